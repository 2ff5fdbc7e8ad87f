-- What happened to workers, newest first.
select *
  from worker_event
 where (event_at_ms, event_id) < (:before_ms, :before_id)
   and (cast(:namespace as text) is null or namespace in (cast(:namespace as text), ''))
   and (cast(:worker_instance_id as text) is null or worker_instance_id = :worker_instance_id)
 order by event_at_ms desc, event_id desc
 limit :limit;

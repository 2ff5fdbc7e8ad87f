-- Workers by namespace and instance, those included on demand that were silent for too long.
select *
  from worker
 where (namespace, worker_instance_id) > (:after_namespace, :after_name)
   and expires_at_ms > :alive_at_ms
   and (cast(:namespace as text) is null or namespace in (cast(:namespace as text), ''))
 order by namespace, worker_instance_id
 limit :limit;

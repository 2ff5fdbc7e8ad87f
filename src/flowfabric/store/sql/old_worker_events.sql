-- What happened to workers before a time, the oldest first.
select *
  from worker_event
 where event_at_ms <= :before_ms
 order by event_at_ms, event_id
 limit :limit;

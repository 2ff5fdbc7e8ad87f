-- Registered workers whose heartbeat has not expired.
select *
  from worker
 where expires_at_ms > :now_ms
 order by namespace, worker_instance_id;

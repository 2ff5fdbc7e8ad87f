-- How many executions each worker has in hand.
select worker_instance_id, count(*) as held
  from live
 where lifecycle_phase = 'active'
   and ownership_state = 'leased'
   and lease_expires_at_ms > :now_ms
 group by worker_instance_id;

-- How many executions of a namespace, or of all, each worker has in hand.
select worker_instance_id, count(*) as held
  from live
 where lifecycle_phase = 'active'
   and ownership_state = 'leased'
   and lease_expires_at_ms > :now_ms
   and (cast(:namespace as text) is null
        or route_id in (select route_id from route where namespace = :namespace))
 group by worker_instance_id;

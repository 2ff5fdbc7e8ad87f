-- The best ready execution of a route that goes on with an attempt and no other claim is
-- taking, locked.
select partition_key, execution_id
  from live
 where route_id = :route_id
   and ready
   and public_state = 'waiting'
   and attempt_state = 'attempt_interrupted'
 order by priority desc, created_at_ms, execution_id
 limit 1
   for update skip locked;

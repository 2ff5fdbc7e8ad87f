-- Members a cancellation takes along: all that have not ended, or those that no worker has and
-- that are not suspended.
select partition_key, execution_id
  from live
 where flow_id = :flow_id
   and (not :only_waiting
        or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
 order by execution_id
 limit :limit;

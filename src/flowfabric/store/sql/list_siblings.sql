-- Upstreams queued because a join no longer needs them, but for those marked for cancellation, which
-- others want cancelled too.
select c.*
  from pending_cancel c
 where c.flow_id = :flow_id
   and c.downstream_id = :downstream_id
   and not exists (
        select 1
          from execution_now e
         where e.partition_key = c.partition_key
           and e.execution_id = c.execution_id
           and e.cancel_requested)
 order by c.partition_key, c.execution_id
 limit :limit;

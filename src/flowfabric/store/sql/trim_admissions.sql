-- Delete the slots of a gate whose executions have ended, or have begun another life since.
delete from admission
 where gate_id = :gate_id
   and not exists (
        select 1
          from live
         where live.partition_key = admission.partition_key
           and live.execution_id = admission.execution_id
           and coalesce(live.replay_count, 0) = admission.replay_count);

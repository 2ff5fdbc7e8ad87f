-- Delete the slots of a gate whose executions have ended, or have begun another life since.
delete from admission
 where gate_id = :gate_id
   and not exists (
        select 1
          from execution_now e
         where e.partition_key = admission.partition_key
           and e.execution_id = admission.execution_id
           and e.lifecycle_phase <> 'terminal'
           and e.replay_count = admission.replay_count);

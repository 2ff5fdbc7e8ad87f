-- How the given executions ended; those that have not are left out.
select e.partition_key, e.execution_id, e.public_state, e.result, e.failure_reason,
       e.cancellation_reason
  from json_each(:rows) as w
 cross join execution as e
    on e.partition_key = w.value ->> 'partition_keys'
   and e.execution_id = w.value ->> 'execution_ids'
 where e.lifecycle_phase = 'terminal';

-- How the given executions ended; those that have not are left out.
select e.partition_key, e.execution_id, e.public_state, e.result, e.failure_reason,
       e.cancellation_reason
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
 cross join lateral (
    select *
      from execution
     where execution.partition_key = w.partition_key
       and execution.execution_id = w.execution_id
     limit 1
 ) e
 where e.lifecycle_phase = 'terminal';

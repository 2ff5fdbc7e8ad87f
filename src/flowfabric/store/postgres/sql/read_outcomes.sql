-- How the given executions ended; those that have not are left out.
select e.partition_key, e.execution_id, e.public_state, e.result, e.failure_reason,
       e.cancellation_reason
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join execution e on e.partition_key = w.partition_key and e.execution_id = w.execution_id
 where e.lifecycle_phase = 'terminal';

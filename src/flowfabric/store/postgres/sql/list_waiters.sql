-- Who waits for any of the given executions.
select t.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join waiter t on t.partition_key = w.partition_key and t.execution_id = w.execution_id;

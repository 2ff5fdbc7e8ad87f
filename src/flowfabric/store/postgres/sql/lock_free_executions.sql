-- Those of the given executions that nobody else has locked; they are locked now.
select e.partition_key, e.execution_id
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join execution e on e.partition_key = w.partition_key and e.execution_id = w.execution_id
   for update of e skip locked;

-- The open waitpoints of the given executions, in key order, locked.
select t.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join waitpoint t on t.partition_key = w.partition_key and t.execution_id = w.execution_id
 where t.state <> 'closed'
 order by t.partition_key, t.execution_id, t.waitpoint_id
   for update of t;

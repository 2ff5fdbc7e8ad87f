-- Every tag of the given executions.
select t.partition_key, t.execution_id, t.tag_key, t.tag_value
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join execution_tag t on t.partition_key = w.partition_key and t.execution_id = w.execution_id;

-- Every tag of the given executions.
select t.partition_key, t.execution_id, t.tag_key, t.tag_value
  from json_each(:partition_keys) as p
  join json_each(:execution_ids) as x on x.key = p.key
  join execution_tag as t on t.partition_key = p.value and t.execution_id = x.value;

-- Every tag of the given executions.
select t.partition_key, t.execution_id, t.tag_key, t.tag_value
  from json_each(:rows)
 cross join execution_tag as t
    on t.partition_key = value ->> 'partition_keys'
   and t.execution_id = value ->> 'execution_ids';

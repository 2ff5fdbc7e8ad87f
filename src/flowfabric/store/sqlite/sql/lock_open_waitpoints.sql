-- The open waitpoints of the given executions, in key order.
select t.*
  from json_each(:partition_keys) as p
  join json_each(:execution_ids) as x on x.key = p.key
  join waitpoint as t on t.partition_key = p.value and t.execution_id = x.value
 where t.state <> 'closed'
 order by t.partition_key, t.execution_id, t.waitpoint_id;

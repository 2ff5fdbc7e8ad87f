-- The open waitpoints of the given executions, in key order.
select t.*
  from json_each(:rows)
 cross join waitpoint as t
    on t.partition_key = value ->> 'partition_keys'
   and t.execution_id = value ->> 'execution_ids'
 where t.state <> 'closed'
 order by t.partition_key, t.execution_id, t.waitpoint_id;

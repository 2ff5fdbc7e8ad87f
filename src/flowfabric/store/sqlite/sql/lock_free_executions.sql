-- Those of the given executions that no other transaction has locked: all that exist, since there
-- is one writer.
select e.partition_key, e.execution_id
  from json_each(:rows) as w
 cross join execution as e
    on e.partition_key = w.value ->> 'partition_keys'
   and e.execution_id = w.value ->> 'execution_ids';

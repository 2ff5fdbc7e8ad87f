-- Who waits for any of the given executions.
select t.*
  from json_each(:rows) as w
 cross join waiter as t
    on t.partition_key = w.value ->> 'partition_keys'
   and t.execution_id = w.value ->> 'execution_ids';

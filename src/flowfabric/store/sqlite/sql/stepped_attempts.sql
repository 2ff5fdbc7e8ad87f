-- Those of the given executions that have stored a step in the given attempt.
select value ->> 'partition_keys' as partition_key, value ->> 'execution_ids' as execution_id
  from json_each(:rows)
 where exists (
    select 1 from step as s
     where s.partition_key = value ->> 'partition_keys'
       and s.execution_id = value ->> 'execution_ids'
       and s.attempt_index = value ->> 'attempt_indexes');

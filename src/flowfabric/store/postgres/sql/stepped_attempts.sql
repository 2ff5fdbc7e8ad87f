-- Those of the given executions that have stored a step in the given attempt.
select k.partition_key, k.execution_id::text as execution_id
  from unnest(:partition_keys::int[], :execution_ids::uuid[], :attempt_indexes::int[])
    as k (partition_key, execution_id, attempt_index)
 where exists (
    select from step s
     where s.partition_key = k.partition_key
       and s.execution_id = k.execution_id
       and s.attempt_index = k.attempt_index);

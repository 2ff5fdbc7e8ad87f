-- The keys of every finished step of one execution, and which attempt finished it.
select step_key, attempt_index
  from step
 where partition_key = :partition_key
   and execution_id = :execution_id;

-- The keys of every finished step of one execution.
select step_key
  from step
 where partition_key = :partition_key
   and execution_id = :execution_id;

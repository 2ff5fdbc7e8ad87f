-- Every finished step of one execution.
select *
  from step
 where partition_key = :partition_key
   and execution_id = :execution_id;

-- Every attempt at one execution, oldest first.
select *
  from attempt
 where partition_key = :partition_key
   and execution_id = :execution_id
 order by attempt_index;

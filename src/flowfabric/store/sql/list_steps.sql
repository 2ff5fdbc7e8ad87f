-- Every finished step of one execution, oldest first.
select *
  from step
 where partition_key = :partition_key
   and execution_id = :execution_id
 order by recorded_at_ms, step_key;

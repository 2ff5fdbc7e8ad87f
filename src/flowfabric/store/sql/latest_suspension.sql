-- The last suspension of one attempt.
select *
  from suspension
 where partition_key = :partition_key
   and execution_id = :execution_id
   and attempt_index = :attempt_index
 order by sequence desc
 limit 1;

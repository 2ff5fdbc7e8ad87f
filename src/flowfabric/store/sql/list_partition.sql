-- Ids of one partition in ascending order, from `start` on.
select execution_id
  from execution
 where partition_key = :partition_key
   and execution_id >= :start
 order by execution_id
 limit :limit;

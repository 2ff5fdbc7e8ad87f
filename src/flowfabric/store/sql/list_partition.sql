-- Ids of one partition in ascending order.
select execution_id
  from execution
 where partition_key = :partition_key
   and execution_id > :after
 order by execution_id
 limit :limit;

-- Executions that have ended and that others wait for, longest ended first.
select partition_key, execution_id
  from ending
 where awaited
 order by completed_at_ms
 limit :limit
   for update skip locked;

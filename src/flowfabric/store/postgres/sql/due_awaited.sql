-- Executions that have ended and that others wait for, longest ended first.
select partition_key, execution_id
  from execution
 where awaited
   and lifecycle_phase = 'terminal'
 order by completed_at_ms
 limit :limit
   for update skip locked;

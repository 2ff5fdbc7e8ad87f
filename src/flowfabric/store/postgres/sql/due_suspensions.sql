-- Executions whose suspension has lasted too long, longest overdue first.
--
-- The execution is what gets locked: every change to a suspension goes through it.
select e.partition_key, e.execution_id
  from suspension s
  join live e on e.partition_key = s.partition_key and e.execution_id = s.execution_id
 where s.closed_at_ms is null
   and s.timeout_at_ms is not null
   and s.timeout_at_ms <= :now_ms
-- within e
 order by s.timeout_at_ms
 limit :limit
   for update of e skip locked;

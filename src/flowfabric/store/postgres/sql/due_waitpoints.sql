-- Executions with pending waitpoints that were not used in time, longest overdue first.
--
-- The execution is what gets locked: every change to a waitpoint goes through it.
select e.partition_key, e.execution_id
  from waitpoint w
  join live e on e.partition_key = w.partition_key and e.execution_id = w.execution_id
 where w.state = 'pending'
   and w.expires_at_ms is not null
   and w.expires_at_ms <= :now_ms
-- within e
 order by w.expires_at_ms
 limit :limit
   for update of e skip locked;

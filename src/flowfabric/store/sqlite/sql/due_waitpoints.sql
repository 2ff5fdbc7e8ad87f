-- Executions with pending waitpoints that were not used in time, longest overdue first.
select partition_key, execution_id
  from waitpoint
 where state = 'pending'
   and expires_at_ms is not null
   and expires_at_ms <= :now_ms
-- within waitpoint
 order by expires_at_ms
 limit :limit;

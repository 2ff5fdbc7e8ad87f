-- Executions whose suspension has lasted too long, longest overdue first.
select partition_key, execution_id
  from suspension
 where closed_at_ms is null
   and timeout_at_ms is not null
   and timeout_at_ms <= :now_ms
-- within suspension
 order by timeout_at_ms
 limit :limit;

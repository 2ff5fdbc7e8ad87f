-- Executions past their own deadline.
select partition_key, execution_id
  from live
 where deadline_at_ms is not null
   and deadline_at_ms <= :now_ms
-- within live
 order by deadline_at_ms
 limit :limit
   for update skip locked;

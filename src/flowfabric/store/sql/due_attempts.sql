-- Executions whose running attempt has taken too long.
select partition_key, execution_id
  from live
 where attempt_deadline_ms is not null
   and attempt_deadline_ms <= :now_ms
-- within live
 order by attempt_deadline_ms
 limit :limit
   for update skip locked;

-- Schedules with a due time that has come, that no other process is acting on.
select *
  from schedule
 where next_due_at_ms <= :now_ms
 order by next_due_at_ms
 limit :limit
   for update skip locked;

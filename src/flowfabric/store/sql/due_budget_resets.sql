-- Budgets whose next reset has come, that no other process is acting on.
select *
  from budget
 where next_reset_at_ms <= :now_ms
 order by next_reset_at_ms
 limit :limit
   for update skip locked;

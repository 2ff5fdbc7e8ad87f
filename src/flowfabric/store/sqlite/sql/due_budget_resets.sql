-- Budgets whose next reset has come.
select *
  from budget
 where next_reset_at_ms <= :now_ms
 order by next_reset_at_ms
 limit :limit;

-- Budgets with something to cancel because of a breach.
select *
  from budget
 where act_at_ms <= :now_ms
 order by act_at_ms
 limit :limit;

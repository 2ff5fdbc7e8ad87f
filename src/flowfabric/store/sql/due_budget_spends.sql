-- Spends that may be forgotten, unless their executions exist.
select *
  from budget_spend
 where keep_until_ms <= :now_ms
 order by keep_until_ms
 limit :limit;

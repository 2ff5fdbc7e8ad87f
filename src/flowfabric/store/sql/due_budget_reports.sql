-- Reports whose keys may be forgotten, unless their executions exist.
select *
  from budget_report
 where keep_until_ms <= :now_ms
 order by keep_until_ms
 limit :limit;

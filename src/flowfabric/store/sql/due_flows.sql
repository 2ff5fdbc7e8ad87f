-- Flows past their keep time.
select *
  from flow
 where retain_until_ms is not null
   and retain_until_ms <= :before_ms
 order by retain_until_ms
 limit :limit
   for update skip locked;

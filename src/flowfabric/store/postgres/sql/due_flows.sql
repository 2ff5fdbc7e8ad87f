-- Flows past their keep time.
select *
  from flow
 where retain_until_ms is not null
   and retain_until_ms <= :before_ms::bigint
 order by retain_until_ms
 limit :limit::bigint
   for update skip locked;

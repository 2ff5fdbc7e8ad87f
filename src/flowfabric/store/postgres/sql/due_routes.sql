-- Routes not asked for lately; they are locked now. Those that a transaction is creating with
-- are left out.
select route_id
  from route
 where retain_until_ms <= :now_ms::bigint
 order by retain_until_ms, route_id
 limit :limit::bigint
   for update skip locked;

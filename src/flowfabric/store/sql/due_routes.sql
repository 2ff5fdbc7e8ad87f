-- Routes not asked for lately; they are locked now. Those that a transaction is creating with
-- are left out.
select route_id
  from route
 where retain_until_ms <= :now_ms
 order by retain_until_ms, route_id
 limit :limit
   for update skip locked;

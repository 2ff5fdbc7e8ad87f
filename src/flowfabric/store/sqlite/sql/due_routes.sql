-- Routes not asked for lately.
select route_id
  from route
 where retain_until_ms <= :now_ms
 order by retain_until_ms, route_id
 limit :limit;

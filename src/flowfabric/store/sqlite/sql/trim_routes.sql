-- Delete routes that nobody has asked for lately and no execution uses; look at those in use again
-- later.
update route
   set retain_until_ms = :retain_until_ms
 where route_id in (
    select route_id from route
     where retain_until_ms <= :before_ms
     order by retain_until_ms
     limit :limit)
   and exists (select 1 from execution where execution.route_id = route.route_id);
-- next
delete from route
 where route_id in (
    select route_id from route
     where retain_until_ms <= :before_ms
     order by retain_until_ms
     limit :limit)
   and not exists (select 1 from execution where execution.route_id = route.route_id);
-- next
select changes() as trimmed, changes() as looked_at;

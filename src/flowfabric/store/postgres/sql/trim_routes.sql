-- Delete routes that nobody has asked for lately and no execution uses; look at those in use again
-- later.
with due as materialized (
    select route_id,
           exists (select from execution e where e.route_id = route.route_id) as in_use
      from route
     where retain_until_ms <= :before_ms::bigint
     order by retain_until_ms
     limit :limit::bigint
       for update skip locked
), kept as (
    update route
       set retain_until_ms = :retain_until_ms::bigint
      from due
     where route.route_id = due.route_id and due.in_use
), gone as (
    delete from route using due
     where route.route_id = due.route_id and not due.in_use
    returning 1
)
select (select count(*) from gone) as trimmed, (select count(*) from due) as looked_at;

-- The best ready execution that a worker can serve.
--
-- Routes first, rows second, as in `claim_ready`. With a route, which is under limits then, that one
-- alone.
select e.partition_key, e.execution_id
  from (
    select route.* from json_each(:kinds) as kind
     cross join json_each(:lanes) as served
     cross join route
        on route.execution_kind = kind.value
       and route.lane_id = served.value
       and route.gated = (:route_id is not null)
    union all
    select route.* from json_each(:lanes) as served
     cross join route on route.lane_id = served.value and route.gated = (:route_id is not null)
     where :kinds is null
  ) as route
 cross join lane on lane.lane_id = route.lane_id and lane.state in ('active', 'draining')
 cross join live as e on e.rowid in (
    select rowid
      from (
        select x.rowid
          from live as x
         where x.route_id = route.route_id
           and x.ready
           and x.public_state = 'waiting'
         order by x.priority desc, x.created_at_ms, x.execution_id
         limit :candidates)
    union all
    select rowid
      from (
        select x.rowid
          from live as x
         where x.route_id = route.route_id
           and x.ready
           and x.public_state = 'active'
         order by x.priority desc, x.created_at_ms, x.execution_id
         limit :candidates))
 where (:route_id is null or route.route_id = :route_id)
   and (:namespace is null or route.namespace = :namespace)
   and not exists (
        select 1 from json_each(route.required_capabilities) as need
         where need.value not in (select value from json_each(:capabilities)))
 order by e.priority desc, e.created_at_ms, e.execution_id
 limit 1;

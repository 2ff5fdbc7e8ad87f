-- Executions that wait in lanes this worker serves and ask for more than it offers: the best of each
-- route, with what it asks for.
select e.partition_key, e.execution_id, route.namespace, route.lane_id, route.execution_kind,
       route.required_capabilities as capabilities
  from json_each(:lanes) as served
 cross join lane on lane.lane_id = served.value and lane.state in ('active', 'draining')
 cross join route on route.lane_id = served.value
 cross join live as e on e.rowid in (
    select x.rowid
      from live as x
     where x.route_id = route.route_id
       and x.ready
       and x.public_state = 'waiting'
     order by x.priority desc, x.created_at_ms, x.execution_id
     limit :limit)
 where (:kinds is null or route.execution_kind in (select value from json_each(:kinds)))
   and (:namespace is null or route.namespace = :namespace)
   and exists (
        select 1 from json_each(route.required_capabilities) as need
         where need.value not in (select value from json_each(:capabilities)))
 limit :limit;

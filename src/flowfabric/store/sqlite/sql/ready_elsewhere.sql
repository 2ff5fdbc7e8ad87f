-- Executions that wait in lanes this worker serves and ask for more than it offers, with what they
-- ask for.
select e.partition_key, e.execution_id, route.namespace, route.lane_id, route.execution_kind,
       route.required_capabilities as capabilities
  from json_each(:lanes) as served
 cross join lane on lane.lane_id = served.value and lane.state in ('active', 'draining')
 cross join route on route.lane_id = served.value
 cross join live as e
    on e.route_id = route.route_id
   and e.ready
   and e.public_state = 'waiting'
 where (:kinds is null or route.execution_kind in (select value from json_each(:kinds)))
   and (:namespace is null or route.namespace = :namespace)
   and exists (
        select 1 from json_each(route.required_capabilities) as need
         where need.value not in (select value from json_each(:capabilities)))
 order by e.priority desc, e.created_at_ms, e.execution_id
 limit :limit;

-- Executions that wait in lanes this worker serves and ask for more than it offers: the best of each
-- route, with what it asks for.
select e.partition_key, e.execution_id, route.namespace, route.lane_id, route.execution_kind,
       to_json(route.required_capabilities)::text as capabilities
  from route
  join lane using (lane_id)
 cross join lateral (
    select x.partition_key, x.execution_id
      from live x
     where x.route_id = route.route_id
       and x.ready
       and x.public_state = 'waiting'
     order by x.priority desc, x.created_at_ms, x.execution_id
     limit :limit::bigint) as e
 where route.lane_id = any(:lanes::text[])
   and (:kinds::text[] is null or route.execution_kind = any(:kinds::text[]))
   and (:namespace::text is null or route.namespace = :namespace)
   and not (route.required_capabilities <@ :capabilities::text[])
   and lane.state in ('active', 'draining')
 limit :limit::bigint;

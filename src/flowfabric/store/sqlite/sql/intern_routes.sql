-- The ids of the given routes, adding those that are new. Call `register_lanes` first.
insert into route (namespace, lane_id, execution_kind, required_capabilities, created_at_ms)
select value ->> 'namespaces', value ->> 'lane_ids', value ->> 'execution_kinds',
       value ->> 'capabilities', :now_ms
  from json_each(:rows)
 where true
    on conflict (namespace, lane_id, execution_kind, required_capabilities) do nothing;
-- next
select route_id, namespace, lane_id, execution_kind, required_capabilities as capabilities
  from json_each(:rows)
 cross join route
    on route.namespace = value ->> 'namespaces'
   and route.lane_id = value ->> 'lane_ids'
   and route.execution_kind = value ->> 'execution_kinds'
   and route.required_capabilities = value ->> 'capabilities';

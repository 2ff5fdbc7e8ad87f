-- The ids of the given routes, adding those that are new. Call `register_lanes` first.
insert into route (lane_id, execution_kind, required_capabilities, created_at_ms)
select value ->> 'lane_ids', value ->> 'execution_kinds', value ->> 'capabilities', :now_ms
  from json_each(:rows)
 where true
    on conflict (lane_id, execution_kind, required_capabilities) do nothing;
-- next
select route_id, lane_id, execution_kind, required_capabilities as capabilities
  from json_each(:rows)
 cross join route
    on route.lane_id = value ->> 'lane_ids'
   and route.execution_kind = value ->> 'execution_kinds'
   and route.required_capabilities = value ->> 'capabilities';

-- The ids of the given routes, adding those that are new, and how many there are then. Call
-- `register_lanes` first.
insert into route (
    namespace, lane_id, execution_kind, required_capabilities, created_at_ms, retain_until_ms)
select value ->> 'namespaces', value ->> 'lane_ids', value ->> 'execution_kinds',
       value ->> 'capabilities', :now_ms, :retain_until_ms
  from json_each(:rows)
 where true
    on conflict (namespace, lane_id, execution_kind, required_capabilities) do update
   set retain_until_ms = max(route.retain_until_ms, excluded.retain_until_ms);
-- next
select route_id, namespace, lane_id, execution_kind, required_capabilities as capabilities,
       (select count(*) from (select 1 from route limit :count_max + 1)) as total
  from json_each(:rows)
 cross join route
    on route.namespace = value ->> 'namespaces'
   and route.lane_id = value ->> 'lane_ids'
   and route.execution_kind = value ->> 'execution_kinds'
   and route.required_capabilities = value ->> 'capabilities';

-- The ids of the given routes, adding those that are new, and how many there are then: all without
-- gates, and those with gates now and then, for they are many. Call `register_lanes` and insert the
-- gates first.
insert into route (
    namespace, lane_id, execution_kind, required_capabilities, gate_ids, gated, created_at_ms,
    retain_until_ms)
select value ->> 'namespaces', value ->> 'lane_ids', value ->> 'execution_kinds',
       value ->> 'capabilities', value ->> 'gate_ids', value ->> 'gate_ids' <> '[]', :now_ms,
       :retain_until_ms
  from json_each(:rows)
 where true
    on conflict (namespace, lane_id, execution_kind, required_capabilities, gate_ids) do update
   set retain_until_ms = max(route.retain_until_ms, excluded.retain_until_ms);
-- next
insert into gate_route (gate_id, route_id)
select gate.value, route.route_id
  from json_each(:rows) as wanted
 cross join route
    on route.namespace = wanted.value ->> 'namespaces'
   and route.lane_id = wanted.value ->> 'lane_ids'
   and route.execution_kind = wanted.value ->> 'execution_kinds'
   and route.required_capabilities = wanted.value ->> 'capabilities'
   and route.gate_ids = wanted.value ->> 'gate_ids'
 cross join json_each(route.gate_ids) as gate
 where true
    on conflict do nothing;
-- next
select route_id, namespace, lane_id, execution_kind, required_capabilities as capabilities, gate_ids,
       case when gated then 0
            else (select count(*) from (select 1 from route where not gated limit :count_max + 1))
       end as total,
       case when gated and route_id % 1000 = 0
            then (select count(*) from (select 1 from route where gated limit :gated_max + 1))
            else 0
       end as gated_total
  from json_each(:rows)
 cross join route
    on route.namespace = value ->> 'namespaces'
   and route.lane_id = value ->> 'lane_ids'
   and route.execution_kind = value ->> 'execution_kinds'
   and route.required_capabilities = value ->> 'capabilities'
   and route.gate_ids = value ->> 'gate_ids';

-- The ids of the given routes, adding those that are new. Call `register_lanes` first.
insert into route (lane_id, execution_kind, required_capabilities, created_at_ms)
select lane.value, kind.value, needs.value, :now_ms
  from json_each(:lane_ids) as lane
  join json_each(:execution_kinds) as kind on kind.key = lane.key
  join json_each(:capabilities) as needs on needs.key = lane.key
 where true
    on conflict (lane_id, execution_kind, required_capabilities) do nothing;
-- next
select route_id, lane_id, execution_kind, required_capabilities as capabilities
  from route
 where (lane_id, execution_kind, required_capabilities) in (
    select lane.value, kind.value, needs.value
      from json_each(:lane_ids) as lane
      join json_each(:execution_kinds) as kind on kind.key = lane.key
      join json_each(:capabilities) as needs on needs.key = lane.key);

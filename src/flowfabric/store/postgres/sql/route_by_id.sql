-- One route; its capabilities as a JSON array.
select lane_id, execution_kind, to_jsonb(required_capabilities)::text as capabilities
  from route
 where route_id = :route_id::bigint;

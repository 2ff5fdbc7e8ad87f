-- One route; its capabilities as a JSON array.
select lane_id, execution_kind, required_capabilities as capabilities
  from route
 where route_id = :route_id;

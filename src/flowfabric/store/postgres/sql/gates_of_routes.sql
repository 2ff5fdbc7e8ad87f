-- The gates of routes.
select gate_id, route_id
  from gate_route
 where route_id = any(:route_ids::integer[])
 order by route_id, gate_id;

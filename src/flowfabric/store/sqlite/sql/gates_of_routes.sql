-- The gates of routes.
select gate_id, route_id
  from gate_route
 where route_id in (select value from json_each(:route_ids))
 order by route_id, gate_id;

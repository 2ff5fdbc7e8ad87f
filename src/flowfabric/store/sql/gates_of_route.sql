-- The gates of a route.
select gate_id
  from gate_route
 where route_id = :route_id
 order by gate_id;

-- The capabilities that a route requires, as a JSON array.
select required_capabilities as capabilities
  from route
 where route_id = :route_id;

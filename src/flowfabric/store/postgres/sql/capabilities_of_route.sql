-- The capabilities that a route requires, as a JSON array.
select to_jsonb(required_capabilities)::text as capabilities
  from route
 where route_id = :route_id::bigint;

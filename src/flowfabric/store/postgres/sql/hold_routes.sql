-- Those of the given routes that are there, with the state of their lane. None of them is forgotten
-- before the transaction ends: `due_routes` passes over what is locked.
select r.route_id, r.namespace, r.lane_id, r.execution_kind,
       to_jsonb(r.required_capabilities)::text as capabilities, r.gate_ids, lane.state
  from route r
  join lane using (lane_id)
 where r.route_id = any(:route_ids::bigint[])
 order by r.route_id
   for key share of r;

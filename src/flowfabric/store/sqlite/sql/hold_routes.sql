-- Those of the given routes that are there, with the state of their lane. None of them is forgotten
-- before the transaction ends, because writers take turns.
select r.route_id, r.namespace, r.lane_id, r.execution_kind,
       r.required_capabilities as capabilities, r.gate_ids, lane.state
  from json_each(:route_ids) as wanted
 cross join route r on r.route_id = wanted.value
 cross join lane on lane.lane_id = r.lane_id
 order by r.route_id;

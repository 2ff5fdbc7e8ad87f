-- Executions attached to a budget that no worker runs and nothing has paused.
select l.partition_key, l.execution_id
  from gate as g
  join gate_route as p on p.gate_id = g.gate_id
  join live as l on l.route_id = p.route_id
 where g.owner_id = :owner_id
   and l.ready
   and l.public_state = 'waiting'
 union all
select l.partition_key, l.execution_id
  from gate as g
  join gate_route as p on p.gate_id = g.gate_id
  join live as l on l.route_id = p.route_id
 where g.owner_id = :owner_id
   and l.public_state in ('waiting', 'delayed', 'rate_limited', 'waiting_children')
   and not (l.ready and l.public_state = 'waiting')
   and l.lifecycle_phase = 'runnable'
 limit :limit;

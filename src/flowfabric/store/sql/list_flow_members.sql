-- Members of a flow, in ascending order.
select m.partition_key, m.execution_id, m.public_state, m.lifecycle_phase, m.blocking_reason,
       (select r.execution_kind from route r where r.route_id = m.route_id) as execution_kind
  from flow_member m
 where m.flow_id = :flow_id
   and m.execution_id >= :start
 order by m.execution_id
 limit :limit;

-- Members of a flow, in ascending order.
select execution_id, execution_kind, public_state, lifecycle_phase, blocking_reason
  from execution
 where flow_id = :flow_id
   and execution_id >= :start
 order by execution_id
 limit :limit;

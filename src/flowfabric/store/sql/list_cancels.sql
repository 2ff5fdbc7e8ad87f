-- Members of a flow that are still to be cancelled.
select execution_id from pending_cancel where flow_id = :flow_id order by execution_id limit :limit;

-- Spare the executions that a join had given up.
delete from pending_cancel where flow_id = :flow_id and downstream_id = :downstream_id;

-- Spare the executions that a join had given up.
delete from pending_cancel where partition_key = :partition_key and downstream_id = :downstream_id;

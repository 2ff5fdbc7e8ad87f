-- Executions that an execution submitted, oldest first.
select partition_key, execution_id, execution_kind, public_state, created_at_ms
  from execution_now
 where parent_execution_id = :parent
 order by created_at_ms, execution_id
 limit :limit;

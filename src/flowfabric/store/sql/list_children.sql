-- Executions that an execution submitted, oldest first, after a place.
select partition_key, execution_id, own_id, execution_kind, public_state, created_at_ms
  from execution_now
 where parent_execution_id = :parent
   and (created_at_ms, execution_id) > (:after_ms, :after_id)
 order by created_at_ms, execution_id
 limit :limit;

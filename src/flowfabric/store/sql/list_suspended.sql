-- Suspended executions of one partition or of all, longest suspended first.
select partition_key, execution_id, suspension_id, created_at_ms as suspended_at_ms,
       reason_code as reason, timeout_at_ms
  from suspension
 where closed_at_ms is null
   and (created_at_ms, execution_id) > (:after_ms, :after_id)
   and (cast(:partition_key as integer) is null or partition_key = :partition_key)
 order by created_at_ms, execution_id
 limit :limit;

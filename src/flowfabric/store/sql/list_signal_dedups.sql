-- What one idempotency key delivered to any of the waitpoints of one name, oldest first.
select d.*
  from waitpoint w
  join signal_dedup d
    on d.partition_key = w.partition_key
   and d.execution_id = w.execution_id
   and d.waitpoint_id = w.waitpoint_id
 where w.partition_key = :partition_key
   and w.execution_id = :execution_id
   and w.waitpoint_key = :waitpoint_key
   and d.idempotency_key = :idempotency_key
 order by w.created_at_ms, w.waitpoint_id;

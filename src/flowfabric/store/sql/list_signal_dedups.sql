-- What one idempotency key delivered under one name, to a waitpoint or to be kept.
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
union all
select d.*
  from signal_dedup d
 where d.partition_key = :partition_key
   and d.execution_id = :execution_id
   and d.waitpoint_id = :mailbox_id
   and d.idempotency_key = :idempotency_key;

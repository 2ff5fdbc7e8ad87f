-- The idempotency keys of the signals that brought one suspension's condition forward.
select dedup.*
  from signal
  join signal_dedup as dedup
    on dedup.partition_key = signal.partition_key
   and dedup.execution_id = signal.execution_id
   and dedup.signal_id = signal.signal_id
 where signal.partition_key = :partition_key
   and signal.execution_id = :execution_id
   and signal.suspension_id = :suspension_id
   and signal.satisfier;

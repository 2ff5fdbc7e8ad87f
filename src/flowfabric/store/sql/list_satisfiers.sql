-- Signals that brought one suspension's condition forward, in order, without their payloads.
select partition_key, execution_id, signal_id, sequence, waitpoint_id, waitpoint_key,
       suspension_id, signal_name, source_type, source_identity, observed_effect, matched, satisfier
  from signal
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id = :suspension_id
   and satisfier
 order by sequence;

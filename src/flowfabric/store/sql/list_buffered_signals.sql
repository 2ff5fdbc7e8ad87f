-- Signals that came early to one pending waitpoint, in order, without their payloads.
select partition_key, execution_id, signal_id, sequence, waitpoint_id, waitpoint_key,
       suspension_id, signal_name, source_type, source_identity, observed_effect, matched, satisfier
  from signal
 where partition_key = :partition_key
   and execution_id = :execution_id
   and waitpoint_id = :waitpoint_id
   and suspension_id is null
 order by sequence;

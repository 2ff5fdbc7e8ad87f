-- One suspension with the signals that brought it forward, in order: a row for each signal,
-- and one without when there is none.
select s.suspension_id,
       s.attempt_index,
       s.waitpoint_id,
       s.reason_code,
       s.timeout_at_ms,
       s.timeout_behavior,
       s.continuation_metadata_pointer,
       s.created_at_ms,
       s.satisfied_at_ms,
       s.closed_at_ms,
       s.close_reason,
       g.signal_id,
       g.signal_name,
       g.signal_category,
       g.waitpoint_key,
       g.source_type,
       g.source_identity,
       g.correlation_id,
       g.accepted_at_ms,
       g.payload,
       g.payload_encoding,
       g.observed_effect as effect,
       g.matched
  from suspension s
  left join signal g
    on g.partition_key = s.partition_key
   and g.execution_id = s.execution_id
   and g.suspension_id = s.suspension_id
   and g.satisfier
 where s.partition_key = :partition_key
   and s.execution_id = :execution_id
   and s.suspension_id = :suspension_id
 order by g.sequence
 limit :limit;

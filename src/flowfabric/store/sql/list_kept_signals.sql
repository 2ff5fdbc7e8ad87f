-- Signals no wait has taken, in order, without their payloads: those that came before one, and
-- those that counted for a pause which ended without its condition being met.
select partition_key, execution_id, signal_id, sequence, waitpoint_id, waitpoint_key,
       suspension_id, signal_name, source_type, source_identity, observed_effect, matched, satisfier
  from signal
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id is null
union all
select g.partition_key, g.execution_id, g.signal_id, g.sequence, g.waitpoint_id, g.waitpoint_key,
       g.suspension_id, g.signal_name, g.source_type, g.source_identity, g.observed_effect,
       g.matched, g.satisfier
  from suspension s
  join signal g
    on g.partition_key = s.partition_key
   and g.execution_id = s.execution_id
   and g.suspension_id = s.suspension_id
   and g.satisfier
 where s.partition_key = :partition_key
   and s.execution_id = :execution_id
   and s.closed_at_ms is not null
   and s.satisfied_at_ms is null
   -- What tells a resumed worker of a timeout is for that pause alone.
   and (s.closer_signal_id is null or s.closer_signal_id <> g.signal_id)
 order by sequence
 limit :limit;

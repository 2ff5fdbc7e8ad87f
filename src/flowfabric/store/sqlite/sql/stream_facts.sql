-- How the given streams stand: their executions, their attempts, and themselves.
select k.key as position, e.lifecycle_phase, e.ownership_state, e.terminal_outcome,
       e.current_attempt_index, e.total_attempt_count, e.completed_at_ms, e.lease_expired_at_ms,
       e.last_mutation_at_ms, a.attempt_state, a.ended_at_ms, a.failure_reason,
       a.failure_category, s.last_frame_id, s.frame_count, s.kept_after, s.expires_at_ms,
       :clock as now_ms
  from json_each(:rows) as k
 cross join execution_now as e
    on e.partition_key = k.value ->> 'partition_keys'
   and e.execution_id = k.value ->> 'execution_ids'
  left join attempt as a
    on a.partition_key = k.value ->> 'partition_keys'
   and a.execution_id = k.value ->> 'execution_ids'
   and a.attempt_index = k.value ->> 'attempt_indexes'
  left join stream as s
    on s.partition_key = k.value ->> 'partition_keys'
   and s.execution_id = k.value ->> 'execution_ids'
   and s.attempt_index = k.value ->> 'attempt_indexes';

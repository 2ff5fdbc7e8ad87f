-- How the given streams stand: their executions, their attempts, and themselves.
select k.place - 1 as position, e.lifecycle_phase, e.ownership_state, e.terminal_outcome,
       e.current_attempt_index, e.total_attempt_count, e.completed_at_ms, e.lease_expired_at_ms,
       e.last_mutation_at_ms, a.attempt_state, a.ended_at_ms, a.failure_reason,
       a.failure_category, s.last_frame_id, s.frame_count, s.kept_after, s.expires_at_ms,
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from unnest(:partition_keys::int[], :execution_ids::uuid[], :attempt_indexes::int[])
       with ordinality as k (partition_key, execution_id, attempt_index, place)
 cross join lateral (
    select *
      from execution_now x
     where x.partition_key = k.partition_key
       and x.execution_id = k.execution_id
     limit 1) as e
  left join lateral (
    select *
      from attempt x
     where x.partition_key = k.partition_key
       and x.execution_id = k.execution_id
       and x.attempt_index = k.attempt_index
     limit 1) as a on true
  left join lateral (
    select *
      from stream x
     where x.partition_key = k.partition_key
       and x.execution_id = k.execution_id
       and x.attempt_index = k.attempt_index
     limit 1) as s on true;

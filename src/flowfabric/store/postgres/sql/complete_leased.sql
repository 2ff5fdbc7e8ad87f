-- Complete the given executions whose fence holds; return the positions of those.
--
-- One round trip stands in for `core.execution.decide_complete` in the sure case: the
-- lease is live, every part of the fence matches, and no waitpoint is left to close. All
-- others are left alone, for the caller to decide one by one.
with given as materialized (
    select *
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[],
          :lease_epochs::bigint[], :attempt_ids::uuid[], :attempt_indexes::int[],
          :results::bytea[], :result_encodings::text[]
      ) with ordinality as g (
          partition_key, execution_id, lease_id, lease_epoch, attempt_id, attempt_index,
          result, result_encoding, position)
), locked as materialized (
    -- By key alone: a condition on the state would invite the planner to walk one of the
    -- partial indexes, which looks empty to it and may hold every running execution.
    select e.ctid as row_version, e.lifecycle_phase, e.ownership_state,
           e.lease_expires_at_ms, e.lease_id, e.worker_instance_id, e.open_waitpoint_count,
           g.result, g.result_encoding, g.position,
           e.lease_id = g.lease_id
               and e.lease_epoch = g.lease_epoch
               and e.current_attempt_id = g.attempt_id
               and e.current_attempt_index = g.attempt_index as fence_matches
      from given g
      join execution e on e.partition_key = g.partition_key and e.execution_id = g.execution_id
     order by e.partition_key, e.execution_id
       for update of e
), clock as materialized (
    -- Reading `locked` first: the time of a decision is taken after its locks.
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
      from (select count(*) from locked) as after_locking
), ended as (
    update execution e
       set lifecycle_phase = 'terminal',
           ownership_state = 'unowned',
           eligibility_state = 'not_applicable',
           blocking_reason = 'none',
           blocking_detail = '',
           terminal_outcome = 'success',
           attempt_state = 'attempt_terminal',
           public_state = 'completed',
           ready = false,
           lease_id = null,
           worker_id = null,
           worker_instance_id = null,
           lease_acquired_at_ms = null,
           lease_expires_at_ms = null,
           lease_last_renewed_at_ms = null,
           lease_renewal_deadline_ms = null,
           lease_expired_at_ms = null,
           lease_revoked_at_ms = null,
           lease_revoke_reason = null,
           attempt_deadline_ms = null,
           attempt_time_left_ms = null,
           delay_until_ms = null,
           completed_at_ms = clock.now_ms,
           last_transition_at_ms = clock.now_ms,
           last_mutation_at_ms = clock.now_ms,
           -- A member is kept as long as its flow, which knows nothing of its end yet.
           retain_until_ms = case when e.flow_id is null
               then clock.now_ms + coalesce(e.retention_ms, :retention_ms::bigint) end,
           result = l.result,
           result_encoding = l.result_encoding
      from locked l, clock
     -- The row is locked, so its version cannot change under us: no need to look it up again.
     where e.ctid = l.row_version
       and l.lifecycle_phase = 'active'
       and l.ownership_state = 'leased'
       and l.fence_matches
       and l.open_waitpoint_count = 0
       and l.lease_expires_at_ms > clock.now_ms
    returning e.partition_key, e.execution_id, e.flow_id, e.lease_epoch, e.current_attempt_index,
              e.replay_count, e.namespace, e.instance_tag, e.awaited, l.lease_id,
              l.worker_instance_id, l.position, clock.now_ms
), attempts as (
    update attempt a
       set attempt_state = 'ended_success',
           ended_at_ms = ended.now_ms,
           failure_reason = null,
           failure_category = null
      from ended
     where a.partition_key = ended.partition_key
       and a.execution_id = ended.execution_id
       and a.attempt_index = ended.current_attempt_index
), told as (
    insert into event (
        category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
        attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
    select kind.category, kind.event_type, partition_key, execution_id, flow_id,
           case when kind.is_lease then lease_id end, lease_epoch, current_attempt_index,
           case when kind.is_lease then worker_instance_id end, kind.reason, namespace,
           instance_tag, now_ms
      from ended
     cross join (values ('lease', 'revoked', 'completed', true, 0),
                        ('completion', 'success', null, false, 1)
                ) as kind (category, event_type, reason, is_lease, place)
     order by position, kind.place
), queued as (
    insert into completion_dispatch (
        partition_key, flow_id, execution_id, replay_count, outcome, enqueued_at_ms)
    select partition_key, flow_id, execution_id, replay_count, 'success', now_ms
      from ended
     where flow_id is not null
)
select position - 1 as position, awaited, flow_id is not null as in_flow from ended;

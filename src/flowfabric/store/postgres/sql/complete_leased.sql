-- Complete the given executions whose lease is live; return how many, and the positions of those.
--
-- One round trip stands in for `core.executions.decide_complete` in the sure case: the lease
-- is the one given, has not ended, and no waitpoint is left to close. A lease id is never
-- used twice and is cleared when the lease is released, so the rest of the fence follows
-- from it. All others are left alone, for the caller to decide one by one.
with given as materialized (
    select *
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[], :results::bytea[],
          :result_encodings::text[]
      ) with ordinality as g (
          partition_key, execution_id, lease_id, result, result_encoding, position)
     -- Rows are locked in the order of their keys. Of two results for one execution the
     -- first counts.
     order by partition_key, execution_id, position
), clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), ended as (
    delete from live e
     using given g
     -- By key and lease alone: a condition on the state would invite the planner to walk one of
     -- the partial indexes, which looks empty to it and may hold every running execution.
     where e.partition_key = g.partition_key
       and e.execution_id = g.execution_id
       and e.lease_id = g.lease_id
       and e.lease_expires_at_ms > (select now_ms from clock)
       and e.lease_expired_at_ms is null
       and e.open_waitpoint_count is null
    -- What is read most often comes first: a row is taken apart up to what is asked of it.
    returning g.position, e.awaited, e.flow_id, e.lease_epoch, e.partition_key, e.execution_id,
              e.lease_id, e.current_attempt_index, e.replay_count, e.instance_tag,
              e.worker_instance_id, e.worker_id, e.route_id, e.created_at_ms,
              e.deadline_at_ms, e.priority, e.total_attempt_count, e.current_attempt_id,
              e.retry_count, e.lease_reclaim_count, e.worker_deaths,
              coalesce(e.started_at_ms, e.lease_acquired_at_ms) as started_at_ms,
              e.retention_ms, e.pending_retry_reason, e.pending_replay_reason,
              e.pending_replay_requested_by, e.pending_previous_attempt_index, e.progress_pct,
              e.progress_message, e.progress_updated_at_ms, e.signal_count, e.keeps_signals,
              e.cancel_requested, e.join_pending, e.last_capability_mismatch_at_ms, e.input,
              e.input_encoding, e.next_input, e.next_input_encoding, g.result, g.result_encoding
), appended as (
    insert into ending (
        partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
        deadline_at_ms, priority, terminal_outcome, public_state, total_attempt_count,
        current_attempt_index, current_attempt_id, retry_count, replay_count,
        lease_reclaim_count, worker_deaths, lease_epoch, final_lease_id, final_worker_id,
        final_worker_instance_id, started_at_ms, completed_at_ms, retain_until_ms,
        pending_retry_reason, pending_replay_reason, pending_replay_requested_by,
        pending_previous_attempt_index, progress_pct, progress_message, progress_updated_at_ms,
        signal_count, keeps_signals, cancel_requested, join_pending,
        last_capability_mismatch_at_ms, input, input_encoding, next_input, next_input_encoding,
        awaited, result, result_encoding)
    select partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
           deadline_at_ms, nullif(priority, 0), 'success', 'completed', total_attempt_count,
           current_attempt_index, current_attempt_id, retry_count,
           replay_count, lease_reclaim_count, worker_deaths, lease_epoch, lease_id, worker_id,
           worker_instance_id, started_at_ms, (select now_ms from clock),
           -- A member is kept as long as its flow, which knows nothing of its end yet.
           case when flow_id is null then
               (select now_ms from clock) + coalesce(retention_ms, 604800000) end,
           pending_retry_reason, pending_replay_reason, pending_replay_requested_by,
           pending_previous_attempt_index, progress_pct, progress_message, progress_updated_at_ms,
           signal_count, keeps_signals, cancel_requested, join_pending,
           last_capability_mismatch_at_ms, input, input_encoding, next_input, next_input_encoding,
           awaited, result, result_encoding
      from ended
     order by execution_id
), attempts as (
    -- All but the first attempt under its first lease, which follows from the execution.
    update attempt a
       set attempt_state = 'ended_success',
           ended_at_ms = (select now_ms from clock),
           failure_reason = null,
           failure_category = null
      from ended
     -- Looked up one by one: as a plain join this may be planned as a walk over the table.
     cross join lateral (
        select x.ctid as row_version
          from attempt x
         where x.partition_key = ended.partition_key
           and x.execution_id = ended.execution_id
           and x.attempt_index = coalesce(ended.current_attempt_index, 0)
         limit 1) as current
     where ended.lease_epoch > 1
       and a.ctid = current.row_version
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, worker_instance_id, reason,
        partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index)
    select (select now_ms from clock), kind.category, kind.event_type,
           (select r.namespace from route r where r.route_id = alike.route_id), instance_tag,
           case when kind.is_lease then worker_instance_id end, kind.reason, partition_keys,
           execution_ids, flow_ids, case when kind.is_lease then lease_ids end, lease_epochs,
           attempt_indexes
      from (select route_id, instance_tag, worker_instance_id,
                   array_agg(partition_key) as partition_keys,
                   array_agg(execution_id) as execution_ids, array_agg(flow_id) as flow_ids,
                   array_agg(lease_id) as lease_ids, array_agg(lease_epoch) as lease_epochs,
                   array_agg(coalesce(current_attempt_index, 0)) as attempt_indexes
              from ended
             group by route_id, instance_tag, worker_instance_id) as alike
     cross join (values ('lease', 'revoked', 'completed', true),
                        ('completion', 'success', null, false)
                ) as kind (category, event_type, reason, is_lease)
     order by kind.is_lease desc
), queued as (
    insert into completion_dispatch (
        partition_key, flow_id, execution_id, replay_count, outcome, enqueued_at_ms)
    select partition_key, flow_id, execution_id, coalesce(replay_count, 0), 'success',
           (select now_ms from clock)
      from ended
     where flow_id is not null
)
select count(*) as completed, array_to_string(array_agg(position - 1), ',') as positions,
       coalesce(bool_or(awaited), false) as awaited, count(flow_id) > 0 as in_flow,
       case when :hint::text is not null and count(*) > 0
            then pg_notify('flowfabric', :hint)::text end as told
  from ended;

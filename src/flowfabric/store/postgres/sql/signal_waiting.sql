-- Deliver a signal to an execution that waits for nothing else, and bring it back; no row unless
-- that is sure.
--
-- One round trip stands in for `core.signals.decide_deliver` in the sure case: the open suspension
-- has one waitpoint and its condition is one of those given, and nothing but a worker is missing
-- afterwards. All else is left alone, for the caller to decide, and so is a
-- row that another transaction has locked.
with waiting as materialized (
    select l.partition_key, l.execution_id, l.flow_id, l.instance_tag,
           coalesce(l.signal_count, 0) as signal_count,
           coalesce(l.current_attempt_index, 0) as attempt_index,
           s.suspension_id, w.waitpoint_id, w.waitpoint_key, r.namespace, r.lane_id,
           coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
      from live l
      join suspension s
        on s.partition_key = l.partition_key
       and s.execution_id = l.execution_id
       and s.suspension_id = l.current_suspension_id
      join waitpoint w
        on w.partition_key = l.partition_key
       and w.execution_id = l.execution_id
       and w.waitpoint_id = s.waitpoint_id
      join execution x
        on x.partition_key = l.partition_key
       and x.execution_id = l.execution_id
      join route r
        on r.route_id = x.route_id
     where l.partition_key = :partition_key
       and l.execution_id = :execution_id
       and l.lifecycle_phase = 'suspended'
       and l.join_pending is null
       and l.next_input is null
       and l.granted_until_ms is null
       and s.closed_at_ms is null
       and s.resume_condition = any(:conditions::text[])
       and s.resume_policy = :resume_policy
       and w.state = 'active'
       and w.suspension_id = s.suspension_id
       and w.waitpoint_key = :waitpoint_key
       and (not w.own_name_only or w.waitpoint_key = :signal_name)
       and coalesce(l.signal_count, 0) < :signals_max::bigint
       and strpos(coalesce(x.policy, ''), 'max_signals_per_execution') = 0
       and (:namespace::text is null or r.namespace = :namespace)
       and not exists (
            select from waitpoint o
             where o.partition_key = s.partition_key
               and o.execution_id = s.execution_id
               and o.suspension_id = s.suspension_id
               and o.waitpoint_id <> s.waitpoint_id)
       for update of l, s, w skip locked
), delivered as (
    insert into signal (
        partition_key, execution_id, signal_id, sequence, waitpoint_id, waitpoint_key,
        suspension_id, signal_name, source_type, source_identity, observed_effect, matched,
        satisfier, signal_category, correlation_id, target_scope, created_at_ms, accepted_at_ms,
        payload, payload_encoding)
    select partition_key, execution_id, :signal_id::uuid, signal_count, waitpoint_id,
           waitpoint_key, suspension_id, :signal_name, :source_type, :source_identity,
           :effect, true, true, :signal_category, :correlation_id, :target_scope,
           coalesce(:created_at_ms::bigint, now_ms), now_ms, :payload::bytea, :payload_encoding
      from waiting
), resumed as (
    update live l
       set lifecycle_phase = 'runnable',
           eligibility_state = null,
           blocking_reason = null,
           blocking_detail = null,
           attempt_state = 'attempt_interrupted',
           public_state = 'waiting',
           ready = true,
           last_transition_at_ms = nullif(
               waiting.now_ms, coalesce(l.lease_acquired_at_ms, l.created_at_ms)),
           last_mutation_at_ms = null,
           current_suspension_id = null,
           current_waitpoint_id = null,
           open_waitpoint_count = nullif(l.open_waitpoint_count - 1, 0),
           signal_count = waiting.signal_count + 1
      from waiting
     where l.partition_key = waiting.partition_key
       and l.execution_id = waiting.execution_id
), ended as (
    update suspension s
       set last_signal_at_ms = waiting.now_ms,
           satisfied_at_ms = waiting.now_ms,
           closed_at_ms = waiting.now_ms,
           close_reason = 'resumed',
           closer_signal_id = :signal_id::uuid
      from waiting
     where s.partition_key = waiting.partition_key
       and s.execution_id = waiting.execution_id
       and s.suspension_id = waiting.suspension_id
), closed as (
    update waitpoint w
       set state = 'closed',
           satisfied_at_ms = waiting.now_ms,
           closed_at_ms = waiting.now_ms,
           close_reason = 'resumed',
           signal_count = w.signal_count + 1,
           matched_signal_count = w.matched_signal_count + 1,
           last_signal_at_ms = waiting.now_ms
      from waiting
     where w.partition_key = waiting.partition_key
       and w.execution_id = waiting.execution_id
       and w.waitpoint_id = waiting.waitpoint_id
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, details, partition_key,
        execution_id, flow_id, attempt_index)
    select now_ms, 'signal', 'satisfied', namespace, instance_tag,
           :details_before || waitpoint_id || :details_after,
           array[partition_key], array[execution_id],
           case when flow_id is not null then array[flow_id] end, array[attempt_index]
      from waiting
)
select topic,
       case when :hint::text is not null
            then pg_notify('flowfabric', concat(:hint, e'\n', topic))::text end as told
  from waiting
 cross join lateral (select concat('ready:', lane_id) as topic) as woken;

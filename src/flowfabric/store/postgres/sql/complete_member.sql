-- Complete a flow's member and tell the one execution that waits for it; no row unless that is
-- sure.
--
-- One round trip stands in for `core.executions.decide_complete` and for what
-- `core.flow_endings.resolve_edges` and `release` make of it, in the sure case: the first attempt,
-- under its first lease; one open edge; a join of all, with nothing against it; and a
-- downstream that waits for nothing else and takes no input but this. The flow goes on. All else
-- is left alone, for the caller to decide, and so is what another transaction has locked or changed.
--
-- Everything is looked up one by one: as a plain join this may be planned as a walk over a table.
with read as materialized (
    select l.*, f.*, w.*, g.*, d.*,
           g.succeeded + 1 >= g.staged as fires, w.data_passing_ref <> '' as passes,
           w.data_passing_ref <> '' and w.replaces_payload and :result::bytea is not null
               as replaces
      from (
        select coalesce(:clock::bigint,
                   floor(extract(epoch from clock_timestamp()) * 1000)::bigint) as now_ms
      ) as clock
     cross join lateral (
        select e.ctid as member_row, e.flow_id as of_flow, clock.now_ms
          from live e
         where e.partition_key = :partition_key
           and e.execution_id = :execution_id
           and e.lease_id = :lease_id
           and e.lease_expires_at_ms > clock.now_ms
           and e.lease_expired_at_ms is null
           and e.open_waitpoint_count is null
           and e.flow_id is not null
           and e.lease_epoch = 1
           and e.total_attempt_count is null
           and e.replay_count is null
         limit 1
     ) as l
     cross join lateral (
        select e.ctid as flow_row
          from flow e
         where e.partition_key = :partition_key
           and e.flow_id = l.of_flow
           and e.derived_state = 'open'
           and e.ended_at_ms is null
           and e.retain_until_ms is null
           and e.members_completed + e.members_failed + e.members_cancelled + e.members_expired
               + e.members_skipped + 1 < e.node_count
         limit 1
     ) as f
     cross join lateral (
        select *
          from (
            select two.*, count(*) over () as open_edges
              from (
                select e.ctid as edge_row, e.edge_id, e.downstream_id,
                       e.edge_state, e.counts_from_replay, e.data_passing_ref, e.replaces_payload
                  from edge e
                 where e.upstream_id = :execution_id
                   and e.partition_key = :partition_key
                   and (e.edge_state <> 'applied' or e.dep_state = 'unsatisfied')
                 limit 2
              ) as two
          ) as counted
         where open_edges = 1
           and edge_state = 'applied'
           and counts_from_replay = 0
         limit 1
     ) as w
     cross join lateral (
        select e.ctid as group_row, e.succeeded, e.staged,
               e.named_inputs, e.prior_eligibility
          from edge_group e
         where e.partition_key = :partition_key
           and e.downstream_id = w.downstream_id
           and e.policy_kind = 'all_of'
           and e.group_state = 'pending'
           and e.failed = 0
           and e.skipped = 0
           and e.succeeded < e.applied
         limit 1
     ) as g
     cross join lateral (
        select e.ctid as child_row, e.route_id as child_route
          from live e
         where e.partition_key = :partition_key
           and e.execution_id = w.downstream_id
           and (g.succeeded + 1 < g.staged
                or (e.eligibility_state = 'blocked_by_dependencies'
                    and e.blocking_reason = 'waiting_for_children'
                    and e.lifecycle_phase = 'runnable'
                    and e.ownership_state = 'unowned'
                    and e.join_pending
                    and e.attempt_state is null
                    and e.lease_epoch is null
                    and e.total_attempt_count is null
                    and e.cancel_requested is null
                    and e.awaits_child is null
                    and e.delay_until_ms is null
                    and e.granted_until_ms is null
                    and e.current_suspension_id is null
                    and e.open_waitpoint_count is null
                    and e.next_input is null
                    and coalesce(g.prior_eligibility, 'eligible_now') = 'eligible_now'
                    and g.named_inputs = (w.data_passing_ref <> '')::int
                    and coalesce(octet_length(:result::bytea), 0) <= :payload_bytes_max::bigint))
         limit 1
     ) as d
), sure as materialized (
    -- The lock of the flow guards its graph. A row that was changed since has moved: its old place
    -- finds nothing.
    select read.*
      from read
     cross join flow f
     cross join live l
     cross join live d
     cross join edge w
     cross join edge_group g
     where f.ctid = read.flow_row
       and l.ctid = read.member_row
       and d.ctid = read.child_row
       and w.ctid = read.edge_row
       and g.ctid = read.group_row
       for update of f, l, d, w, g skip locked
), ended as (
    delete from live e
     using sure
     where e.ctid = sure.member_row
    returning sure.now_ms, e.partition_key, e.execution_id, e.route_id, e.created_at_ms, e.flow_id,
              e.instance_tag, e.deadline_at_ms, e.priority, e.current_attempt_index,
              e.current_attempt_id, e.retry_count, e.lease_reclaim_count, e.worker_deaths,
              e.lease_epoch, e.lease_id, e.worker_id, e.worker_instance_id,
              coalesce(e.started_at_ms, e.lease_acquired_at_ms) as started_at_ms,
              e.pending_retry_reason, e.pending_replay_reason, e.pending_replay_requested_by,
              e.pending_previous_attempt_index, e.progress_pct, e.progress_message,
              e.progress_updated_at_ms, e.signal_count, e.keeps_signals, e.cancel_requested,
              e.join_pending, e.last_capability_mismatch_at_ms, e.input, e.input_encoding,
              e.next_input, e.next_input_encoding, e.awaited
), appended as (
    -- A member is kept as long as its flow.
    insert into ending (
        partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
        deadline_at_ms, priority, terminal_outcome, public_state, current_attempt_index,
        current_attempt_id, retry_count, lease_reclaim_count, worker_deaths, lease_epoch,
        final_lease_id, final_worker_id, final_worker_instance_id, started_at_ms,
        completed_at_ms, pending_retry_reason, pending_replay_reason,
        pending_replay_requested_by, pending_previous_attempt_index, progress_pct,
        progress_message, progress_updated_at_ms, signal_count, keeps_signals,
        cancel_requested, join_pending, last_capability_mismatch_at_ms, input,
        input_encoding, next_input, next_input_encoding, awaited, result, result_encoding)
    select partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
           deadline_at_ms, nullif(priority, 0), 'success', 'completed', current_attempt_index,
           current_attempt_id, retry_count, lease_reclaim_count, worker_deaths, lease_epoch,
           lease_id, worker_id, worker_instance_id, started_at_ms,
           now_ms, pending_retry_reason, pending_replay_reason,
           pending_replay_requested_by, pending_previous_attempt_index, progress_pct,
           progress_message, progress_updated_at_ms, signal_count, keeps_signals,
           cancel_requested, join_pending, last_capability_mismatch_at_ms, input,
           input_encoding, next_input, next_input_encoding, awaited, :result::bytea,
           :result_encoding::text
      from ended
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, worker_instance_id, reason,
        partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index)
    select now_ms, kind.category, kind.event_type,
           (select r.namespace from route r where r.route_id = ended.route_id), instance_tag,
           case when kind.is_lease then worker_instance_id end, kind.reason,
           array[partition_key], array[execution_id], array[flow_id],
           case when kind.is_lease then array[lease_id] end, array[lease_epoch],
           array[coalesce(current_attempt_index, 0)]
      from ended
     cross join (values ('lease', 'revoked', 'completed', true),
                        ('completion', 'success', null, false)
                ) as kind (category, event_type, reason, is_lease)
     order by kind.is_lease desc
), counted as (
    update flow f
       set members_completed = f.members_completed + 1,
           last_ended_at_ms = greatest(f.last_ended_at_ms, sure.now_ms)
      from sure
     where f.ctid = sure.flow_row
), resolved as (
    update edge w
       set dep_state = 'satisfied',
           resolved_at_ms = sure.now_ms,
           resolved_outcome = 'success'
      from sure
     where w.ctid = sure.edge_row
), passed as (
    insert into execution_input (
        partition_key, execution_id, edge_id, name, value, value_encoding, replaces_payload,
        resolved_at_ms)
    select :partition_key, downstream_id, edge_id, data_passing_ref, :result::bytea,
           :result_encoding::text, replaces_payload, now_ms
      from sure
     where passes
), joined as (
    update edge_group g
       set succeeded = g.succeeded + 1,
           group_state = case when sure.fires then 'satisfied' else g.group_state end,
           fired_at_ms = case when sure.fires then sure.now_ms end
      from sure
     where g.ctid = sure.group_row
), released as (
    update live d
       set eligibility_state = null,
           blocking_reason = null,
           blocking_detail = null,
           public_state = 'waiting',
           ready = true,
           join_pending = null,
           last_mutation_at_ms = nullif(sure.now_ms, coalesce(
               d.last_transition_at_ms, d.lease_acquired_at_ms, d.created_at_ms)),
           input = case when sure.replaces then :result::bytea else d.input end,
           input_encoding = case when sure.replaces then :result_encoding::text
                                 else d.input_encoding end
      from sure
     where d.ctid = sure.child_row
       and sure.fires
)
select topic, coalesce(awaited, false) as awaited,
       case when :hint::text is not null
            then pg_notify('flowfabric', concat(:hint, e'\n', topic))::text end as told
  from ended
 cross join sure
 cross join lateral (
    select case when sure.fires
                then (select concat('ready:', r.lane_id) from route r
                       where r.route_id = sure.child_route)
                else 'completion' end as topic) as woken;

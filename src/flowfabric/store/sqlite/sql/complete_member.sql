-- Complete a flow's member and tell the one execution that waits for it; no row unless that is
-- sure.
--
-- Together these stand in for `core.executions.decide_complete` and for what
-- `core.flow_endings.resolve_edges` and `release` make of it, in the sure case: the first attempt,
-- under its first lease; one open edge; a join of all, with nothing against it; and a
-- downstream that waits for nothing else and takes no input but this. The flow goes on. All else
-- is left alone, for the caller to decide. Whether the first of them has resolved the edge
-- tells the others: before its first end no member has one that is satisfied.
update edge
   set dep_state = 'satisfied',
       resolved_at_ms = :clock,
       resolved_outcome = 'success'
 where (flow_id, edge_id, partition_key) = (
    select w.flow_id, w.edge_id, w.partition_key
      from execution as x
     cross join live as l on l.execution_rowid = x.execution_rowid
     cross join flow as f
        on f.partition_key = l.partition_key
       and f.flow_id = l.flow_id
     cross join edge as w
        on w.upstream_id = l.execution_id
       and w.partition_key = l.partition_key
     cross join edge_group as g
        on g.partition_key = w.partition_key
       and g.downstream_id = w.downstream_id
     cross join execution as y
        on y.partition_key = w.partition_key
       and y.execution_id = w.downstream_id
     cross join live as d on d.execution_rowid = y.execution_rowid
     where x.partition_key = :partition_key
       and x.execution_id = :execution_id
       and l.lease_id = :lease_id
       and l.lifecycle_phase = 'active'
       and l.ownership_state = 'leased'
       and l.lease_expires_at_ms > :clock
       and l.open_waitpoint_count = 0
       and l.lease_epoch = 1
       and l.total_attempt_count = 1
       and l.replay_count = 0
       and f.derived_state = 'open'
       and f.ended_at_ms is null
       and f.retain_until_ms is null
       and f.members_completed + f.members_failed + f.members_cancelled + f.members_expired
           + f.members_skipped + 1 < f.node_count
       and w.edge_state = 'applied'
       and w.dep_state = 'unsatisfied'
       and w.counts_from_replay = 0
       and not exists (
            select 1 from edge as o
             where o.upstream_id = l.execution_id
               and o.partition_key = l.partition_key
               and o.edge_id <> w.edge_id
               and (o.edge_state <> 'applied' or o.dep_state = 'unsatisfied'))
       and g.policy_kind = 'all_of'
       and g.group_state = 'pending'
       and g.failed = 0
       and g.skipped = 0
       and g.succeeded < g.applied
       and (g.succeeded + 1 < g.staged
            or (d.eligibility_state = 'blocked_by_dependencies'
                and d.blocking_reason = 'waiting_for_children'
                and d.lifecycle_phase = 'runnable'
                and d.ownership_state = 'unowned'
                and d.join_pending
                and coalesce(d.attempt_state, 'pending_first_attempt') = 'pending_first_attempt'
                and d.total_attempt_count = 0
                and not d.cancel_requested
                and not d.awaits_child
                and d.delay_until_ms is null
                and d.granted_until_ms is null
                and d.current_suspension_id is null
                and d.open_waitpoint_count = 0
                and d.next_input is null
                and coalesce(g.prior_eligibility, 'eligible_now') = 'eligible_now'
                and g.named_inputs = (w.data_passing_ref <> '')
                and coalesce(length(:result), 0) <= :payload_bytes_max)));
-- next, if any
update flow
   set members_completed = members_completed + 1,
       last_ended_at_ms = max(coalesce(last_ended_at_ms, :clock), :clock)
 where (partition_key, flow_id) = (
    select w.partition_key, w.flow_id from edge as w
     where w.upstream_id = :execution_id
       and w.partition_key = :partition_key
       and w.dep_state = 'satisfied');
-- next, if any
insert into execution_input (
    partition_key, execution_id, edge_id, name, value, value_encoding, replaces_payload,
    resolved_at_ms)
select w.partition_key, w.downstream_id, w.edge_id, w.data_passing_ref, :result, :result_encoding,
       w.replaces_payload, :clock
  from edge as w
 where w.upstream_id = :execution_id
   and w.partition_key = :partition_key
   and w.dep_state = 'satisfied'
   and w.data_passing_ref <> '';
-- next, if any
update edge_group
   set succeeded = succeeded + 1,
       group_state = case when succeeded + 1 >= staged then 'satisfied' else group_state end,
       fired_at_ms = case when succeeded + 1 >= staged then :clock end
 where (partition_key, downstream_id) = (
    select w.partition_key, w.downstream_id from edge as w
     where w.upstream_id = :execution_id
       and w.partition_key = :partition_key
       and w.dep_state = 'satisfied');
-- next, if any
update live
   set eligibility_state = 'eligible_now',
       blocking_reason = 'waiting_for_worker',
       blocking_detail = '',
       public_state = 'waiting',
       ready = 1,
       join_pending = 0,
       last_mutation_at_ms = :clock,
       input = case when :result is not null and exists (
            select 1 from edge as w
             where w.upstream_id = :execution_id
               and w.partition_key = :partition_key
               and w.dep_state = 'satisfied'
               and w.data_passing_ref <> ''
               and w.replaces_payload)
            then :result else input end,
       input_encoding = case when :result is not null and exists (
            select 1 from edge as w
             where w.upstream_id = :execution_id
               and w.partition_key = :partition_key
               and w.dep_state = 'satisfied'
               and w.data_passing_ref <> ''
               and w.replaces_payload)
            then :result_encoding else input_encoding end
 where execution_rowid = (
    select y.execution_rowid
      from edge as w
     cross join edge_group as g
        on g.partition_key = w.partition_key
       and g.downstream_id = w.downstream_id
     cross join execution as y
        on y.partition_key = w.partition_key
       and y.execution_id = w.downstream_id
     where w.upstream_id = :execution_id
       and w.partition_key = :partition_key
       and w.dep_state = 'satisfied'
       and g.group_state = 'satisfied');
-- next, if any
-- A member is kept as long as its flow.
insert into ending (
    execution_rowid, partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
    deadline_at_ms, priority, terminal_outcome, public_state, total_attempt_count,
    current_attempt_index, current_attempt_id, retry_count, replay_count, lease_reclaim_count,
    worker_deaths, lease_epoch, final_lease_id, final_worker_id, final_worker_instance_id,
    started_at_ms, completed_at_ms, pending_retry_reason, pending_replay_reason,
    pending_replay_requested_by, pending_previous_attempt_index, progress_pct, progress_message,
    progress_updated_at_ms, signal_count, keeps_signals, cancel_requested, join_pending,
    last_capability_mismatch_at_ms, input, input_encoding, next_input, next_input_encoding,
    awaited, result, result_encoding)
select l.execution_rowid, l.partition_key, l.execution_id, l.route_id, l.created_at_ms, l.flow_id,
       l.instance_tag, l.deadline_at_ms, l.priority, 'success', 'completed',
       l.total_attempt_count, l.current_attempt_index, l.current_attempt_id, l.retry_count,
       l.replay_count, l.lease_reclaim_count, l.worker_deaths, l.lease_epoch, l.lease_id,
       l.worker_id, l.worker_instance_id,
       coalesce(l.started_at_ms, l.lease_acquired_at_ms), :clock, l.pending_retry_reason,
       l.pending_replay_reason, l.pending_replay_requested_by, l.pending_previous_attempt_index,
       l.progress_pct, l.progress_message, l.progress_updated_at_ms, l.signal_count,
       l.keeps_signals, l.cancel_requested, l.join_pending, l.last_capability_mismatch_at_ms,
       l.input, l.input_encoding, l.next_input, l.next_input_encoding, l.awaited, :result,
       :result_encoding
  from execution as x
 cross join live as l on l.execution_rowid = x.execution_rowid
 where x.partition_key = :partition_key
   and x.execution_id = :execution_id;
-- next, if any
-- Before the events: they go to the pages that become free.
delete from live
 where execution_rowid = (
    select x.execution_rowid from execution as x
     where x.partition_key = :partition_key and x.execution_id = :execution_id);
-- next, if any
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
select 'lease', 'revoked', n.partition_key, n.execution_id, n.flow_id, n.final_lease_id,
       n.lease_epoch, n.current_attempt_index, n.final_worker_instance_id, 'completed',
       route.namespace, n.instance_tag, :clock
  from execution as x
 cross join ending as n on n.execution_rowid = x.execution_rowid
 cross join route on route.route_id = n.route_id
 where x.partition_key = :partition_key
   and x.execution_id = :execution_id;
-- next, if any
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_epoch, attempt_index,
    namespace, instance_tag, occurred_at_ms)
select 'completion', 'success', n.partition_key, n.execution_id, n.flow_id, n.lease_epoch,
       n.current_attempt_index, route.namespace, n.instance_tag, :clock
  from execution as x
 cross join ending as n on n.execution_rowid = x.execution_rowid
 cross join route on route.route_id = n.route_id
 where x.partition_key = :partition_key
   and x.execution_id = :execution_id;
-- next
select case when g.group_state = 'satisfied' then 'ready:' || r.lane_id else 'completion' end
           as topic,
       n.awaited
  from execution as x
 cross join ending as n on n.execution_rowid = x.execution_rowid
 cross join edge as w
    on w.upstream_id = n.execution_id
   and w.partition_key = n.partition_key
   and w.dep_state = 'satisfied'
 cross join edge_group as g
    on g.partition_key = w.partition_key
   and g.downstream_id = w.downstream_id
 cross join execution as y
    on y.partition_key = w.partition_key
   and y.execution_id = w.downstream_id
 cross join route as r on r.route_id = y.route_id
 where changes() > 0
   and x.partition_key = :partition_key
   and x.execution_id = :execution_id;

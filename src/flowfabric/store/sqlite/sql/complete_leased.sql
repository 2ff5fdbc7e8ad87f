-- Complete the given executions whose lease is live; return how many, and the positions of those.
--
-- Together these stand in for `core.executions.decide_complete` in the sure case: the
-- lease is the one given, has not ended, and no waitpoint is left to close. A lease id is
-- never used twice and is cleared when the lease is released, so the rest of the fence
-- follows from it. All others are left alone, for the caller to decide one by one.
delete from completing;
-- and
-- A lease that `claim_ready` has granted ends with the number of its row.
insert into completing (execution_rowid, position, lease_epoch, flow_id, awaited)
select e.execution_rowid, g.key, e.lease_epoch, e.flow_id, e.awaited
  from json_each(:lease_ids) as g
 cross join live as e on e.execution_rowid = cast(substr(g.value, 25) as integer)
 where e.lease_id = g.value
   and e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.open_waitpoint_count = 0
   and e.lease_expires_at_ms > :clock
    on conflict (execution_rowid) do nothing;
-- and
-- Other leases, if there are any, are found by their execution. Each that was found takes 39
-- characters of the list: its id, the quotes, and a comma or bracket.
insert into completing (execution_rowid, position, lease_epoch, flow_id, awaited)
select e.execution_rowid, g.key, e.lease_epoch, e.flow_id, e.awaited
  from json_each(case when 39 * (select count(*) from temp.completing) + 1 < length(:lease_ids)
                      then :lease_ids end) as g
 cross join execution as x
    on x.partition_key = given('partition_keys', g.key)
   and x.execution_id = given('execution_ids', g.key)
 cross join live as e on e.execution_rowid = x.execution_rowid
 where e.lease_id = g.value
   and e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.open_waitpoint_count = 0
   and e.lease_expires_at_ms > :clock
    on conflict (execution_rowid) do nothing;
-- and
insert into ending (
    execution_rowid, partition_key, execution_id, route_id, created_at_ms, flow_id, instance_tag,
    deadline_at_ms, priority, terminal_outcome, public_state, total_attempt_count,
    current_attempt_index, current_attempt_id, retry_count, replay_count, lease_reclaim_count,
    worker_deaths, lease_epoch, final_lease_id, final_worker_id, final_worker_instance_id,
    started_at_ms, completed_at_ms, retain_until_ms,
    pending_retry_reason, pending_replay_reason, pending_replay_requested_by,
    pending_previous_attempt_index, progress_pct, progress_message, progress_updated_at_ms,
    signal_count, keeps_signals, cancel_requested, join_pending,
    last_capability_mismatch_at_ms, input, input_encoding, next_input, next_input_encoding,
    awaited, result, result_encoding)
select l.execution_rowid, l.partition_key, l.execution_id, l.route_id, l.created_at_ms, l.flow_id,
       l.instance_tag, l.deadline_at_ms, l.priority, 'success', 'completed',
       l.total_attempt_count, l.current_attempt_index, l.current_attempt_id, l.retry_count,
       l.replay_count, l.lease_reclaim_count, l.worker_deaths, l.lease_epoch, l.lease_id,
       l.worker_id, l.worker_instance_id,
       coalesce(l.started_at_ms, l.lease_acquired_at_ms), :clock,
       -- A member is kept as long as its flow, which knows nothing of its end yet.
       case when l.flow_id is null then :clock + l.retention_ms end,
       l.pending_retry_reason, l.pending_replay_reason, l.pending_replay_requested_by,
       l.pending_previous_attempt_index, l.progress_pct, l.progress_message,
       l.progress_updated_at_ms, l.signal_count, l.keeps_signals, l.cancel_requested,
       l.join_pending, l.last_capability_mismatch_at_ms, l.input, l.input_encoding, l.next_input,
       l.next_input_encoding, l.awaited, given('results', c.position),
       given('result_encodings', c.position)
  from temp.completing as c
 cross join live as l on l.execution_rowid = c.execution_rowid;
-- and
-- All but the first attempt under its first lease, which follows from the execution.
update attempt
   set attempt_state = 'ended_success',
       ended_at_ms = :clock,
       failure_reason = null,
       failure_category = null
 -- The uuid first: the other way round SQLite searches by the partition alone.
 where (execution_id, partition_key, attempt_index) in (
    select e.execution_id, e.partition_key, e.current_attempt_index
      from temp.completing as c
     cross join live as e on e.execution_rowid = c.execution_rowid
     where c.lease_epoch > 1);
-- and
insert into completion_dispatch (
    partition_key, flow_id, execution_id, replay_count, outcome, enqueued_at_ms)
select e.partition_key, e.flow_id, e.execution_id, e.replay_count, 'success', :clock
  from temp.completing as c
 cross join live as e on e.execution_rowid = c.execution_rowid
 where c.flow_id is not null;
-- and
-- Before the events: they go to the pages that become free.
delete from live where execution_rowid in (select execution_rowid from temp.completing);
-- and
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
select 'lease', 'revoked', n.partition_key, n.execution_id, n.flow_id, n.final_lease_id,
       n.lease_epoch, n.current_attempt_index, n.final_worker_instance_id, 'completed',
       route.namespace, n.instance_tag, :clock
  from temp.completing as c
 cross join ending as n on n.execution_rowid = c.execution_rowid
 cross join route on route.route_id = n.route_id;
-- and
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_epoch, attempt_index,
    namespace, instance_tag, occurred_at_ms)
select 'completion', 'success', n.partition_key, n.execution_id, n.flow_id, n.lease_epoch,
       n.current_attempt_index, route.namespace, n.instance_tag, :clock
  from temp.completing as c
 cross join ending as n on n.execution_rowid = c.execution_rowid
 cross join route on route.route_id = n.route_id;
-- next
select count(*) as completed, group_concat(position) as positions,
       coalesce(max(awaited), 0) as awaited, count(flow_id) > 0 as in_flow
  from temp.completing;

-- Complete the given executions whose lease is live; return the positions of those.
--
-- Together these stand in for `core.execution.decide_complete` in the sure case: the
-- lease is the one given, has not ended, and no waitpoint is left to close. A lease id is
-- never used twice and is cleared when the lease is released, so the rest of the fence
-- follows from it. All others are left alone, for the caller to decide one by one.
delete from temp.completing;
-- next
insert into temp.completing (
    execution_rowid, partition_key, execution_id, attempt_index, lease_epoch, position, result,
    result_encoding)
select e.rowid, e.partition_key, e.execution_id, e.current_attempt_index, e.lease_epoch, g.key,
       unhex(g.value ->> 'results'), g.value ->> 'result_encodings'
  from json_each(:rows) as g
 cross join execution as e
    on e.partition_key = g.value ->> 'partition_keys'
   and e.execution_id = g.value ->> 'execution_ids'
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = g.value ->> 'lease_ids'
   and e.open_waitpoint_count = 0
   and e.lease_expires_at_ms > :clock
    on conflict (execution_rowid) do nothing;
-- next
update execution
   set lifecycle_phase = 'terminal',
       ownership_state = 'unowned',
       eligibility_state = 'not_applicable',
       blocking_reason = 'none',
       blocking_detail = '',
       terminal_outcome = 'success',
       attempt_state = 'attempt_terminal',
       public_state = 'completed',
       ready = 0,
       final_lease_id = lease_id,
       final_worker_id = worker_id,
       final_worker_instance_id = worker_instance_id,
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
       completed_at_ms = :clock,
       last_transition_at_ms = :clock,
       last_mutation_at_ms = :clock,
       -- A member is kept as long as its flow, which knows nothing of its end yet.
       retain_until_ms = case when flow_id is null
           then :clock + coalesce(retention_ms, :retention_ms) end,
       result = c.result,
       result_encoding = c.result_encoding
  from temp.completing as c
 where execution.rowid = c.execution_rowid
   and execution.rowid in (select execution_rowid from temp.completing);
-- next
-- All but the first attempt under its first lease, which follows from the execution.
update attempt
   set attempt_state = 'ended_success',
       ended_at_ms = :clock,
       failure_reason = null,
       failure_category = null
 -- The uuid first: the other way round SQLite searches by the partition alone.
 where (execution_id, partition_key, attempt_index) in (
    select execution_id, partition_key, attempt_index from temp.completing where lease_epoch > 1);
-- next
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
select kind.category, kind.event_type, e.partition_key, e.execution_id, e.flow_id,
       case when kind.is_lease then e.final_lease_id end, e.lease_epoch, e.current_attempt_index,
       case when kind.is_lease then e.final_worker_instance_id end, kind.reason, e.namespace,
       e.instance_tag, :clock
  from temp.completing as c
 cross join execution as e on e.rowid = c.execution_rowid
 cross join (
    select 'lease' as category, 'revoked' as event_type, 'completed' as reason, 1 as is_lease
    union all
    select 'completion', 'success', null, 0) as kind
 order by c.position, kind.is_lease desc;
-- next
insert into completion_dispatch (
    partition_key, flow_id, execution_id, replay_count, outcome, enqueued_at_ms)
select e.partition_key, e.flow_id, e.execution_id, e.replay_count, 'success', :clock
  from temp.completing as c
 cross join execution as e on e.rowid = c.execution_rowid
 where e.flow_id is not null;
-- next
select c.position, e.awaited, e.flow_id is not null as in_flow
  from temp.completing as c
 cross join execution as e on e.rowid = c.execution_rowid;

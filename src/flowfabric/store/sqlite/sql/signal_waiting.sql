-- Deliver a signal to an execution that waits for nothing else, and bring it back; no row unless
-- that is sure.
--
-- Together these stand in for `core.signals.decide_deliver` in the sure case: the open suspension
-- has one waitpoint and its condition is one of those given, and nothing but a worker is missing
-- afterwards. All else is left alone, for the caller to decide. Whether the
-- first of them has stored the signal, whose id is new, tells the others.
insert into signal (
    partition_key, execution_id, signal_id, sequence, waitpoint_id, waitpoint_key, suspension_id,
    signal_name, source_type, source_identity, observed_effect, matched, satisfier,
    signal_category, correlation_id, target_scope, created_at_ms, accepted_at_ms, payload,
    payload_encoding)
select l.partition_key, l.execution_id, :signal_id, l.signal_count, w.waitpoint_id,
       w.waitpoint_key, s.suspension_id, :signal_name, :source_type, :source_identity,
       :effect, 1, 1, :signal_category, :correlation_id, :target_scope,
       coalesce(:created_at_ms, :clock), :clock, :payload, :payload_encoding
  from execution as x
 cross join live as l on l.execution_rowid = x.execution_rowid
 cross join suspension as s
    on s.partition_key = l.partition_key
   and s.execution_id = l.execution_id
   and s.suspension_id = l.current_suspension_id
 cross join waitpoint as w
    on w.partition_key = l.partition_key
   and w.execution_id = l.execution_id
   and w.waitpoint_id = s.waitpoint_id
 cross join route as r on r.route_id = x.route_id
 where x.partition_key = :partition_key
   and x.execution_id = :execution_id
   and l.lifecycle_phase = 'suspended'
   and not l.join_pending
   and l.next_input is null
   and l.granted_until_ms is null
   and s.closed_at_ms is null
   and s.resume_condition in (select value from json_each(:conditions))
   and s.resume_policy = :resume_policy
   and w.state = 'active'
   and w.suspension_id = s.suspension_id
   and w.waitpoint_key = :waitpoint_key
   and (not w.own_name_only or w.waitpoint_key = :signal_name)
   and l.signal_count < :signals_max
   and instr(x.policy, 'max_signals_per_execution') = 0
   and (:namespace is null or r.namespace = :namespace)
   and not exists (
        select 1 from waitpoint as o
         where o.partition_key = s.partition_key
           and o.execution_id = s.execution_id
           and o.suspension_id = s.suspension_id
           and o.waitpoint_id <> s.waitpoint_id);
-- next
update live
   set lifecycle_phase = 'runnable',
       eligibility_state = 'eligible_now',
       blocking_reason = 'waiting_for_worker',
       blocking_detail = '',
       attempt_state = 'attempt_interrupted',
       public_state = 'waiting',
       ready = 1,
       last_transition_at_ms = :clock,
       last_mutation_at_ms = :clock,
       current_suspension_id = null,
       current_waitpoint_id = null,
       open_waitpoint_count = open_waitpoint_count - 1,
       signal_count = signal_count + 1
 where execution_rowid = (
    select x.execution_rowid from execution as x
     where x.partition_key = :partition_key and x.execution_id = :execution_id)
   and exists (
    select 1 from signal as g
     where g.partition_key = :partition_key
       and g.execution_id = :execution_id
       and g.signal_id = :signal_id);
-- next
update suspension
   set last_signal_at_ms = :clock,
       satisfied_at_ms = :clock,
       closed_at_ms = :clock,
       close_reason = 'resumed',
       closer_signal_id = :signal_id
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id = (
    select g.suspension_id from signal as g
     where g.partition_key = :partition_key
       and g.execution_id = :execution_id
       and g.signal_id = :signal_id);
-- next
update waitpoint
   set state = 'closed',
       satisfied_at_ms = :clock,
       closed_at_ms = :clock,
       close_reason = 'resumed',
       signal_count = signal_count + 1,
       matched_signal_count = matched_signal_count + 1,
       last_signal_at_ms = :clock
 where partition_key = :partition_key
   and execution_id = :execution_id
   and waitpoint_id = (
    select g.waitpoint_id from signal as g
     where g.partition_key = :partition_key
       and g.execution_id = :execution_id
       and g.signal_id = :signal_id);
-- next
insert into event (
    category, event_type, partition_key, execution_id, flow_id, attempt_index, details,
    namespace, instance_tag, occurred_at_ms)
select 'signal', 'satisfied', l.partition_key, l.execution_id, l.flow_id,
       l.current_attempt_index, :details_before || g.waitpoint_id || :details_after, r.namespace,
       l.instance_tag, :clock
  from signal as g
 cross join execution as x
    on x.partition_key = g.partition_key
   and x.execution_id = g.execution_id
 cross join live as l on l.execution_rowid = x.execution_rowid
 cross join route as r on r.route_id = l.route_id
 where g.partition_key = :partition_key
   and g.execution_id = :execution_id
   and g.signal_id = :signal_id;
-- next
select 'ready:' || r.lane_id as topic
  from signal as g
 cross join execution as x
    on x.partition_key = g.partition_key
   and x.execution_id = g.execution_id
 cross join live as l on l.execution_rowid = x.execution_rowid
 cross join route as r on r.route_id = l.route_id
 where g.partition_key = :partition_key
   and g.execution_id = :execution_id
   and g.signal_id = :signal_id;

-- Create executions that are ready at once, if their routes are there and their lanes take new
-- work; else none. Returns whether they were created.
--
-- It stands in for `core.creation.new_execution`: for requests under new ids, with neither key,
-- parent, tags, delay nor deadline. `terms` is what they share, and `places` has a digit for each
-- request that says which of them are its.
delete from temp.creating;
-- next
insert into temp.creating
select t.key, r.route_id, t.value ->> 'payload_encoding', t.value ->> 'priority', t.value ->> 'creator_identity',
       t.value ->> 'policy', t.value ->> 'attempt_timeout_ms', t.value ->> 'retention_ms',
       t.value ->> 'retention_failed_ms'
  from json_each(:terms) as t
 -- An id may have been given to another route since.
 cross join route r
    on r.route_id = t.value ->> 'route_id'
   and r.namespace = t.value ->> 'namespace'
   and r.lane_id = t.value ->> 'lane_id'
   and r.execution_kind = t.value ->> 'execution_kind'
   and r.required_capabilities = t.value ->> 'required_capabilities'
   and r.gate_ids = t.value ->> 'gate_ids'
 cross join lane on lane.lane_id = r.lane_id and lane.state in ('active', 'paused');
-- next
delete from temp.creating
 where json_array_length(:terms) > (select count(*) from temp.creating);
-- next
insert into execution (
    partition_key, execution_id, route_id, creator_identity, created_at_ms, payload, payload_encoding, policy, attempt_timeout_ms, retention_ms,
    retention_failed_ms)
select substr(k.value ->> 'execution_ids', 5, length(k.value ->> 'execution_ids') - 42),
       substr(k.value ->> 'execution_ids', -36), t.route_id, t.creator_identity, :clock,
       unhex(k.value ->> 'payloads'),
       t.payload_encoding, t.policy, t.attempt_timeout_ms, t.retention_ms, t.retention_failed_ms
  from json_each(:rows) as k
 cross join temp.creating as t on t.place = cast(substr(:places, k.key + 1, 1) as integer);
-- next
insert into live (
    partition_key, execution_id, route_id, priority, lifecycle_phase, ownership_state,
    eligibility_state, blocking_reason, blocking_detail, attempt_state, public_state, ready,
    total_attempt_count, current_attempt_index, retry_count, replay_count, lease_reclaim_count,
    worker_deaths, lease_epoch, open_waitpoint_count, signal_count, keeps_signals,
    cancel_requested, join_pending, awaited, awaits_child, created_at_ms, last_transition_at_ms,
    last_mutation_at_ms, retention_ms)
select substr(k.value ->> 'execution_ids', 5, length(k.value ->> 'execution_ids') - 42),
       substr(k.value ->> 'execution_ids', -36), t.route_id, t.priority,
       'runnable', 'unowned', 'eligible_now', 'waiting_for_worker', '', 'pending_first_attempt',
       'waiting', 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, :clock, :clock, :clock,
       t.retention_ms
  from json_each(:rows) as k
 cross join temp.creating as t on t.place = cast(substr(:places, k.key + 1, 1) as integer);
-- next
select count(*) > 0 as made from temp.creating;

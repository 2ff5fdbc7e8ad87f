-- Create executions, if their routes are there, their lanes take new work, their keys and ids are
-- free and their parents are in their namespace; else none. Returns whether they were created, and when.
--
-- It stands in for `core.creation.new_execution` where all is new. `terms` is what requests share, and
-- `places` has a digit for each request that says which of them are its. There is one writer, so
-- it waits for no other.
delete from temp.creating;
-- next
insert into temp.creating
select t.key, (select coalesce(max(execution_rowid), 0) + 1 from execution), r.route_id, r.namespace, t.value ->> 'payload_encoding', t.value ->> 'priority',
       t.value ->> 'creator_identity', t.value ->> 'policy', t.value ->> 'attempt_timeout_ms',
       t.value ->> 'retention_ms', t.value ->> 'retention_failed_ms',
       nullif(max(coalesce(t.value ->> 'delay_until_ms', :clock + (t.value ->> 'delay_ms'), :clock),
                  :clock), :clock),
       coalesce(t.value ->> 'deadline_at_ms', :clock + (t.value ->> 'deadline_after_ms')),
       t.value ->> 'idempotency_ttl_ms', t.value ->> 'instance_tag', t.value -> 'tag_rows'
  from json_each(:terms) as t
 -- An id may have been given to another route since.
 cross join route r
    on r.route_id = t.value ->> 'route_id'
   and r.namespace = t.value ->> 'namespace'
   and r.lane_id = t.value ->> 'lane_id'
   and r.execution_kind = t.value ->> 'execution_kind'
   and r.required_capabilities = t.value ->> 'required_capabilities'
   and r.gate_ids = t.value ->> 'gate_ids'
 cross join lane on lane.lane_id = r.lane_id and lane.state in ('active', 'paused')
 where coalesce(:lock_wait_ms, 0) >= 0;
-- next
delete from temp.creating
 where json_array_length(:terms) > (select count(*) from temp.creating)
    or :has_keys and exists (
        select 1
          from json_each(:execution_ids) as k
         cross join temp.creating as t
            on t.place = cast(substr(:places, k.key + 1, 1) as integer)
         cross join idempotency_guard as g
            on g.namespace = t.namespace
           and g.idempotency_key = given('idempotency_keys', k.key)
         where given('idempotency_keys', k.key) is not null)
    or not :ids_are_new and exists (
        select 1
          from json_each(:execution_ids) as k
         cross join execution as x
            on x.partition_key
               = cast(substr(k.value, 5) as integer)
           and x.execution_id = substr(k.value, -36))
    or :has_parents and exists (
        select 1
          from json_each(:execution_ids) as k
         cross join temp.creating as t
            on t.place = cast(substr(:places, k.key + 1, 1) as integer)
         cross join execution as x
            on x.partition_key = cast(substr(given('parents', k.key), 5) as integer)
           and x.execution_id = substr(given('parents', k.key), -36)
         cross join route as r on r.route_id = x.route_id
         where given('parents', k.key) is not null
           and r.namespace <> t.namespace);
-- next
insert into idempotency_guard (namespace, idempotency_key, execution, fingerprint, expires_at_ms)
select t.namespace, given('idempotency_keys', k.key), k.value,
       given('fingerprints', k.key), :clock + t.idempotency_ttl_ms
  from json_each(:execution_ids) as k
 cross join temp.creating as t on t.place = cast(substr(:places, k.key + 1, 1) as integer)
 where :has_keys
   and given('idempotency_keys', k.key) is not null;
-- next
insert into execution (
    execution_rowid, partition_key, execution_id, route_id, creator_identity, created_at_ms, payload,
    payload_encoding, policy, attempt_timeout_ms, retention_ms, retention_failed_ms, own_id,
    idempotency_key, parent_execution_id)
select t.first_rowid + k.key, cast(substr(k.value, 5) as integer),
       substr(k.value, -36), t.route_id, t.creator_identity, :clock,
       given('payloads', k.key), t.payload_encoding, t.policy, t.attempt_timeout_ms,
       t.retention_ms, t.retention_failed_ms, given('own_ids', k.key),
       given('idempotency_keys', k.key), given('parents', k.key)
  from json_each(:execution_ids) as k
 cross join temp.creating as t on t.place = cast(substr(:places, k.key + 1, 1) as integer);
-- next
insert into live (
    execution_rowid, partition_key, execution_id, route_id, priority, lifecycle_phase, ownership_state,
    eligibility_state, blocking_reason, blocking_detail, attempt_state, public_state, ready,
    total_attempt_count, current_attempt_index, retry_count, replay_count, lease_reclaim_count,
    worker_deaths, lease_epoch, open_waitpoint_count, signal_count, keeps_signals,
    cancel_requested, join_pending, awaited, awaits_child, created_at_ms, last_transition_at_ms,
    last_mutation_at_ms, attempt_timeout_ms, retention_ms, delay_until_ms, deadline_at_ms,
    instance_tag)
select t.first_rowid + k.key, cast(substr(k.value, 5) as integer),
       substr(k.value, -36), t.route_id, t.priority, 'runnable', 'unowned',
       iif(t.until_ms is null, 'eligible_now', 'not_eligible_until_time'),
       iif(t.until_ms is null, 'waiting_for_worker', 'waiting_for_delay'),
       coalesce('delayed until ' || t.until_ms, ''), 'pending_first_attempt',
       iif(t.until_ms is null, 'waiting', 'delayed'), t.until_ms is null,
       0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, :clock, :clock, :clock,
       t.attempt_timeout_ms, t.retention_ms, t.until_ms, t.deadline_at_ms, t.instance_tag
  from json_each(:execution_ids) as k
 cross join temp.creating as t on t.place = cast(substr(:places, k.key + 1, 1) as integer);
-- next
insert into execution_tag (partition_key, execution_id, tag_key, tag_value, created_at_ms)
select cast(substr(k.value, 5) as integer),
       substr(k.value, -36), tag.value ->> 0, tag.value ->> 1, :clock
  from temp.creating as t
 cross join json_each(t.tag_rows) as tag
 cross join json_each(:execution_ids) as k on t.place = cast(substr(:places, k.key + 1, 1) as integer);
-- next
insert into event (
    category, event_type, partition_key, execution_id, details, namespace, instance_tag,
    occurred_at_ms)
select 'tag', tag.value ->> 2, cast(substr(k.value, 5) as integer),
       substr(k.value, -36), tag.value ->> 3, t.namespace, t.instance_tag,
       :clock
  from temp.creating as t
 cross join json_each(t.tag_rows) as tag
 cross join json_each(:execution_ids) as k on t.place = cast(substr(:places, k.key + 1, 1) as integer)
 order by k.key, tag.key;
-- next
select count(*) > 0 as made, :clock as now_ms from temp.creating;

-- Create executions, if their routes are there, their lanes take new work, their keys and ids are
-- free and their parents are in their namespace; else none. Returns whether they were created, and when.
--
-- One round trip stands in for `core.creation.new_execution` where all is new. `terms` is what
-- requests share, and `places` has a digit for each request that says which of them are its. What none
-- of them has is an empty array. Routes are held until this has committed: `due_routes` passes over
-- what is locked. Who takes the same key or id at the same time breaks a constraint here, after waiting
-- for `lock_wait_ms` at most.
with clock as materialized (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms,
           case when :lock_wait_ms::bigint is not null
                then set_config('lock_timeout', :lock_wait_ms::bigint::text, true) end as patience
), term as materialized (
    select t.*
      from jsonb_to_recordset(:terms::jsonb) as t (
               place integer, route_id bigint, namespace text, lane_id text, execution_kind text,
               required_capabilities jsonb, gate_ids text, payload_encoding text, priority integer,
               creator_identity text, policy text, attempt_timeout_ms bigint,
               retention_ms bigint, retention_failed_ms bigint, delay_until_ms bigint,
               delay_ms bigint, deadline_at_ms bigint, deadline_after_ms bigint,
               idempotency_ttl_ms bigint, instance_tag text, tag_rows jsonb)
      join route r on r.route_id = t.route_id
      join lane on lane.lane_id = r.lane_id
       -- An id may have been given to another route since.
     where r.namespace = t.namespace
       and r.lane_id = t.lane_id
       and r.execution_kind = t.execution_kind
       and to_jsonb(r.required_capabilities) = t.required_capabilities
       and r.gate_ids = t.gate_ids
       and lane.state in ('active', 'paused')
       for key share of r
), new as materialized (
    select substr(k.wire_id, 5, length(k.wire_id) - 42)::smallint as partition_key,
           right(k.wire_id, 36)::uuid as execution_id, k.*, clock.now_ms,
           nullif(greatest(
               coalesce(t.delay_until_ms, clock.now_ms + t.delay_ms), clock.now_ms),
               clock.now_ms) as until_ms,
           t.*
      from clock
     cross join unnest(
               :execution_ids::text[], :payloads::bytea[], :own_ids::text[],
               :idempotency_keys::text[], :fingerprints::bytea[], :parents::text[])
           with ordinality as k (
               wire_id, payload, own_id, idempotency_key, fingerprint, parent, number)
      join term t on t.place = get_byte(:places::bytea, k.number::integer - 1) - ascii('0')
     where (select count(*) from term) = jsonb_array_length(:terms::jsonb)
), taken as materialized (
    select case when :has_keys::boolean then exists (
                    select
                      from new
                     cross join lateral (
                        select from idempotency_guard g
                         where g.namespace = new.namespace
                           and g.idempotency_key = new.idempotency_key
                         limit 1) as guard)
                else false end
           or case when :ids_are_new::boolean then false
                   else exists (
                    select
                      from new
                     cross join lateral (
                        select from execution x
                         where x.partition_key = new.partition_key
                           and x.execution_id = new.execution_id
                         limit 1) as former)
                   end
           or case when :has_parents::boolean then exists (
                    select
                      from new
                     cross join lateral (
                        select x.route_id from execution x
                         where x.partition_key = split_part(substr(new.parent, 5), '}', 1)::int
                           and x.execution_id = right(new.parent, 36)::uuid
                         limit 1) as parent
                      join route r on r.route_id = parent.route_id
                     where r.namespace <> new.namespace)
                   else false end as is_so
), guards as (
    insert into idempotency_guard (
        namespace, idempotency_key, execution, fingerprint, expires_at_ms)
    select namespace, idempotency_key, wire_id, fingerprint, now_ms + idempotency_ttl_ms
      from new
     where idempotency_key is not null and not (select is_so from taken)
     order by namespace, idempotency_key
), asked as (
    insert into execution (
        partition_key, execution_id, route_id, creator_identity, created_at_ms, payload,
        payload_encoding, policy, attempt_timeout_ms, retention_ms, retention_failed_ms, own_id,
        idempotency_key, parent_execution_id)
    select partition_key, execution_id, route_id, nullif(creator_identity, ''), now_ms, payload,
           payload_encoding, nullif(policy, '{}'), attempt_timeout_ms,
           nullif(retention_ms, 604800000), nullif(retention_failed_ms, 2592000000), own_id,
           idempotency_key, parent
      from new
     where not (select is_so from taken)
), made as (
    insert into live (
        partition_key, execution_id, route_id, priority, lifecycle_phase, ownership_state,
        public_state, ready, created_at_ms, attempt_timeout_ms, retention_ms, eligibility_state,
        blocking_reason, blocking_detail, delay_until_ms, deadline_at_ms, instance_tag)
    select partition_key, execution_id, route_id, priority, 'runnable', 'unowned',
           (case when until_ms is null then 'waiting' else 'delayed' end)::public_state,
           until_ms is null, now_ms, attempt_timeout_ms, nullif(retention_ms, 604800000),
           case when until_ms is not null then 'not_eligible_until_time'::eligibility_state end,
           case when until_ms is not null then 'waiting_for_delay'::blocking_reason end,
           'delayed until ' || until_ms, until_ms,
           coalesce(deadline_at_ms, now_ms + deadline_after_ms), instance_tag
      from new
     where not (select is_so from taken)
    returning created_at_ms
), tags as (
    insert into execution_tag (partition_key, execution_id, tag_key, tag_value, created_at_ms)
    select partition_key, execution_id, tag ->> 0, tag ->> 1, now_ms
      from new
     cross join lateral jsonb_array_elements(tag_rows) as tag
     where not (select is_so from taken)
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, details, partition_key,
        execution_id)
    select now_ms, 'tag', tag ->> 2, namespace, instance_tag, tag ->> 3,
           array_agg(partition_key order by number), array_agg(execution_id order by number)
      from new
     cross join lateral jsonb_array_elements(tag_rows) with ordinality as tags (tag, which)
     where not (select is_so from taken)
     group by now_ms, place, namespace, instance_tag, tag, which
     order by which, place
)
select count(*) > 0 as made, max(created_at_ms) as now_ms,
       case when count(*) > 0 and :hint::text is not null
            then pg_notify('flowfabric', :hint)::text end as told
  from made;

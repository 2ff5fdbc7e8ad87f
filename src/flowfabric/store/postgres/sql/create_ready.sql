-- Create executions that are ready at once, if their routes are there and their lanes take new
-- work; else none. Returns whether they were created.
--
-- One round trip stands in for `core.creation.new_execution`: for requests under new ids, with
-- neither key, parent, tags, delay nor deadline. `terms` is what they share, and `places` has a
-- digit for each request that says which of them are its. Routes are held until this has
-- committed: `due_routes` passes over what is locked.
with clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), term as materialized (
    select t.*
      from jsonb_to_recordset(:terms::jsonb) as t (
               place integer, route_id bigint, namespace text, lane_id text, execution_kind text,
               required_capabilities jsonb, gate_ids text, payload_encoding text, priority integer,
               creator_identity text, policy text, attempt_timeout_ms bigint,
               retention_ms bigint, retention_failed_ms bigint)
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
           right(k.wire_id, 36)::uuid as execution_id, k.payload, clock.now_ms, t.*
      from clock
     cross join unnest(:execution_ids::text[], :payloads::bytea[])
           with ordinality as k (wire_id, payload, number)
      join term t on t.place = get_byte(:places::bytea, k.number::integer - 1) - ascii('0')
     where (select count(*) from term) = jsonb_array_length(:terms::jsonb)
), asked as (
    insert into execution (
        partition_key, execution_id, route_id, creator_identity, created_at_ms, payload,
        payload_encoding, policy, attempt_timeout_ms, retention_ms, retention_failed_ms)
    select partition_key, execution_id, route_id, nullif(creator_identity, ''), now_ms, payload,
           payload_encoding, nullif(policy, '{}'), attempt_timeout_ms,
           nullif(retention_ms, 604800000), nullif(retention_failed_ms, 2592000000)
      from new
), made as (
    insert into live (
        partition_key, execution_id, route_id, priority, lifecycle_phase, ownership_state,
        public_state, ready, created_at_ms, retention_ms)
    select partition_key, execution_id, route_id, priority, 'runnable', 'unowned', 'waiting', true,
           now_ms, nullif(retention_ms, 604800000)
      from new
    returning 1
)
select count(*) > 0 as made,
       case when count(*) > 0 and :hint::text is not null
            then pg_notify('flowfabric', :hint)::text end as told
  from made;

-- The ids of the given routes, adding those that are new, and how many there are then: all without
-- gates, and those with gates now and then, for they are many. Call `register_lanes` and insert the
-- gates first.
--
-- Until the transaction ends no budget is attached in these namespaces (`hold_namespace`): one that
-- was created is seen by the next statement, and one that is being created will see these routes.
with wanted as (
    select w.namespace, w.lane_id, w.execution_kind, w.gate_ids,
           array(select jsonb_array_elements_text(w.capabilities::jsonb)) as required,
           sha256(convert_to(w.capabilities || w.gate_ids, 'UTF8')) as needs_hash
      from unnest(:namespaces::text[], :lane_ids::text[], :execution_kinds::text[],
                  :capabilities::text[], :gate_ids::text[])
               as w (namespace, lane_id, execution_kind, capabilities, gate_ids)
), held as materialized (
    select count(pg_advisory_xact_lock_shared(hashtextextended('routes of ' || namespace, 0)))
      from (select distinct namespace from wanted order by namespace) as named
), added as (
    insert into route (
        namespace, lane_id, execution_kind, required_capabilities, gate_ids, gated, needs_hash,
        created_at_ms, retain_until_ms)
    select namespace, lane_id, execution_kind, required, gate_ids, gate_ids <> '[]', needs_hash,
           :now_ms::bigint, :retain_until_ms::bigint
      from wanted, held
     order by namespace, lane_id, execution_kind, needs_hash
        on conflict (namespace, lane_id, execution_kind, needs_hash)
        do update set retain_until_ms = greatest(route.retain_until_ms, excluded.retain_until_ms)
    returning route_id, namespace, lane_id, execution_kind, required_capabilities,
              gate_ids, gated, xmax = 0 as is_new
), passed as (
    insert into gate_route (gate_id, route_id)
    select gate_id::uuid, route_id
      from added
     cross join jsonb_array_elements_text(gate_ids::jsonb) as gate_id
        on conflict do nothing
)
select route_id, namespace, lane_id, execution_kind,
       to_jsonb(required_capabilities)::text as capabilities, gate_ids,
       case when exists (select from added where is_new and not gated)
            then (select count(*)
                    from (select from route where not gated limit :count_max::bigint) as counted)
                 + (select count(*) from added where is_new and not gated)
            else 0 end as total,
       case when exists (select from added where is_new and gated and route_id % 1000 = 0)
            then (select count(*)
                    from (select from route where gated limit :gated_max::bigint + 1) as counted)
            else 0 end as gated_total
  from added;

-- The ids of the given routes, adding those that are new, and how many there are then. Call
-- `register_lanes` first.
with wanted as (
    select w.namespace, w.lane_id, w.execution_kind,
           array(select jsonb_array_elements_text(w.capabilities::jsonb)) as required,
           sha256(convert_to(w.capabilities, 'UTF8')) as required_hash
      from unnest(:namespaces::text[], :lane_ids::text[], :execution_kinds::text[],
                  :capabilities::text[]) as w (namespace, lane_id, execution_kind, capabilities)
), added as (
    insert into route (
        namespace, lane_id, execution_kind, required_capabilities, capabilities_hash,
        created_at_ms, retain_until_ms)
    select namespace, lane_id, execution_kind, required, required_hash, :now_ms::bigint,
           :retain_until_ms::bigint
      from wanted
     order by namespace, lane_id, execution_kind, required_hash
        on conflict (namespace, lane_id, execution_kind, capabilities_hash)
        do update set retain_until_ms = greatest(route.retain_until_ms, excluded.retain_until_ms)
    returning route_id, namespace, lane_id, execution_kind, required_capabilities,
              xmax = 0 as is_new
)
select route_id, namespace, lane_id, execution_kind,
       to_jsonb(required_capabilities)::text as capabilities,
       (select count(*) from (select from route limit :count_max::bigint) as counted)
           + (select count(*) from added where is_new) as total
  from added;

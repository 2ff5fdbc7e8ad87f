-- The ids of the given routes, adding those that are new. Call `register_lanes` first.
with wanted as (
    select w.namespace, w.lane_id, w.execution_kind,
           array(select jsonb_array_elements_text(w.capabilities::jsonb)) as required
      from unnest(:namespaces::text[], :lane_ids::text[], :execution_kinds::text[],
                  :capabilities::text[]) as w (namespace, lane_id, execution_kind, capabilities)
), added as (
    insert into route (namespace, lane_id, execution_kind, required_capabilities, created_at_ms)
    select namespace, lane_id, execution_kind, required, :now_ms::bigint
      from wanted
     order by namespace, lane_id, execution_kind, required
        -- Updating nothing makes a concurrent insert of the same route visible here.
        on conflict (namespace, lane_id, execution_kind, required_capabilities)
        do update set created_at_ms = route.created_at_ms
    returning route_id, namespace, lane_id, execution_kind, required_capabilities
)
select route_id, namespace, lane_id, execution_kind,
       to_jsonb(required_capabilities)::text as capabilities
  from added;

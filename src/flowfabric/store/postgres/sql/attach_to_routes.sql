-- Attach to the given routes the budgets for their lane, their kind or their namespace; tell how many
-- routes have become limited by that.
with wanted as materialized (
    select distinct w.route_id, g.gate_id
      from unnest(:route_ids::int[], :namespaces::text[], :lane_ids::text[], :kinds::text[],
                  :names::text[]) as w (route_id, namespace, lane_id, kind, name)
     cross join lateral (
        values ('lane', w.lane_id), ('kind', w.kind), ('kind', w.name), ('namespace', w.namespace)
     ) as s (scope_type, scope_id)
     cross join lateral (
        select b.budget_id
          from budget as b
         where b.scope_type = s.scope_type
           and b.scope_id = s.scope_id
           and b.scope_type in ('lane', 'kind', 'namespace')
           and (b.namespace = w.namespace or s.scope_type = 'namespace')
        offset 0
     ) as b
     cross join lateral (
        select gate.gate_id from gate where gate.owner_id = b.budget_id and gate.gate_key = '' limit 1
     ) as g
), added as (
    insert into gate_route (gate_id, route_id)
    select gate_id, route_id
      from wanted
     order by gate_id, route_id
        on conflict do nothing
), limited as (
    update route
       set gated = true
     where route_id = any(array(select route_id from wanted))
       and not gated
    returning route_id
)
select count(*) as limited from limited;

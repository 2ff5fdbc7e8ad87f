-- Attach a budget to the routes of what it is for; tell how many have become limited by that.
with wanted as materialized (
    select g.gate_id, r.route_id
      from (select * from budget where budget_id = :budget_id::uuid) as b
     cross join lateral (
        select gate.gate_id from gate where gate.owner_id = b.budget_id and gate.gate_key = '' limit 1
     ) as g
     cross join lateral (
        select route.route_id
          from route
         where route.namespace
                   = case when b.scope_type = 'namespace' then b.scope_id else b.namespace end
           and case b.scope_type
                   when 'namespace' then true
                   when 'lane' then route.lane_id = b.scope_id
                   when 'kind' then route.execution_kind = b.scope_id
                                    or starts_with(route.execution_kind, b.scope_id || '@')
                   else false
               end
     ) as r
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

-- Attach to the given routes the budgets for their lane, their kind or their namespace; tell how many
-- routes have become limited by that.
insert into gate_route (gate_id, route_id)
select g.gate_id, w.value ->> 'route_ids'
  from json_each(:rows) as w
 cross join budget as b
    on b.scope_type in ('lane', 'kind', 'namespace')
   and ((b.scope_type = 'lane' and b.scope_id = w.value ->> 'lane_ids')
        or (b.scope_type = 'kind'
            and b.scope_id in (w.value ->> 'kinds', w.value ->> 'names'))
        or (b.scope_type = 'namespace' and b.scope_id = w.value ->> 'namespaces'))
   and (b.namespace = w.value ->> 'namespaces' or b.scope_type = 'namespace')
 cross join gate as g on g.owner_id = b.budget_id and g.gate_key = ''
 where true
    on conflict do nothing;
-- next
update route
   set gated = 1
 where gated = 0
   and route_id in (select value ->> 'route_ids' from json_each(:rows))
   and exists (select 1 from gate_route where gate_route.route_id = route.route_id);
-- next
select changes() as limited;

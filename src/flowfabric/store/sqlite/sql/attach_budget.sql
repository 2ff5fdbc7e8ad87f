-- Attach a budget to the routes of what it is for; tell how many have become limited by that.
insert into gate_route (gate_id, route_id)
select g.gate_id, r.route_id
  from budget as b
 cross join gate as g on g.owner_id = b.budget_id and g.gate_key = ''
 cross join route as r
    on r.namespace = case when b.scope_type = 'namespace' then b.scope_id else b.namespace end
   and case b.scope_type
           when 'namespace' then true
           when 'lane' then r.lane_id = b.scope_id
           when 'kind' then r.execution_kind = b.scope_id
                            or substr(r.execution_kind, 1, length(b.scope_id) + 1)
                                   = b.scope_id || '@'
           else false
       end
 where b.budget_id = :budget_id
    on conflict do nothing;
-- next
update route
   set gated = 1
 where gated = 0
   and route_id in (
    select p.route_id
      from gate as g
     cross join gate_route as p on p.gate_id = g.gate_id
     where g.owner_id = :budget_id);
-- next
select changes() as limited;

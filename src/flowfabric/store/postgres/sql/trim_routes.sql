-- Delete those of the given routes that no execution uses; look at the others again later. Lock them
-- by a statement of its own before: a transaction that has created with one meanwhile is seen by this one.
with looked_at as materialized (
    select w.route_id,
           -- Asked for one row each: `exists` may be planned as reading all routes of all executions.
           coalesce(
               (select true from live
                 where live.route_id = w.route_id and ready and public_state = 'waiting' limit 1),
               (select true from live
                 where live.route_id = w.route_id and not (ready and public_state = 'waiting')
                 limit 1),
               (select true from ending where ending.route_id = w.route_id limit 1),
               -- The gates of its keys go with it, and must not as long as a start counts.
               (select true
                  from gate_route p
                  join gate g on g.gate_id = p.gate_id
                  join quota_policy q on q.quota_policy_id = g.owner_id
                 where p.route_id = w.route_id
                   and (g.starts::jsonb -> -1 ->> 0)::bigint > :now_ms::bigint - q.window_ms
                 limit 1),
               false) as in_use
      from unnest(:route_ids::bigint[]) as w (route_id)
), kept as (
    update route
       set retain_until_ms = :retain_until_ms::bigint
      from looked_at
     where route.route_id = looked_at.route_id and looked_at.in_use
), unpassed as (
    delete from gate_route using looked_at
     where gate_route.route_id = looked_at.route_id and not looked_at.in_use
), gone as (
    delete from route using looked_at
     where route.route_id = looked_at.route_id and not looked_at.in_use
    returning 1
)
select count(*) as trimmed from gone;

-- What gates limit, and how much of each is held: by live leases, by grants not used yet, by
-- admissions and, where the policy keeps slots, by what goes on with an attempt later. Lock those that limit anything by a statement of its own before, so that this one
-- sees what others have claimed meanwhile. Gates
-- without a cap are counted only if told.
--
-- A gate of few routes is counted route by route, one of many by walking through all leases.
with clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
)
select g.gate_id::text as gate_id, g.owner_kind, g.owner_id::text as owner_id, g.gate_key, g.starts,
       g.opens_at_ms, g.closed, coalesce(p.window_ms, 0) as window_ms,
       coalesce(p.max_requests_per_window, 0) as rate,
       coalesce(p.active_concurrency_cap, 0) as cap, coalesce(p.jitter_ms, 0) as jitter_ms,
       coalesce(p.while_suspended = 'keep', false) as keeps,
       p.quota_policy_id is not null as has_policy,
       case when not (:counts_all::boolean or coalesce(p.active_concurrency_cap, 0) > 0) then 0
            when (select count(*)
                    from (select from gate_route r where r.gate_id = g.gate_id limit 33) as few) < 33
            then (select count(*)
                    from gate_route r
                   cross join lateral (
                        select
                          from live l
                         where l.route_id = r.route_id
                           and l.public_state = 'active'
                           and not (l.ready and l.public_state = 'waiting')
                           and l.ownership_state = 'leased'
                           and l.lease_expires_at_ms > clock.now_ms
                        -- Route by route: the planner would walk through all leases for each gate.
                        offset 0) as held
                   where r.gate_id = g.gate_id)
            else (select count(*)
                    from live l
                    join gate_route r on r.route_id = l.route_id and r.gate_id = g.gate_id
                   where l.lifecycle_phase = 'active'
                     and l.ownership_state = 'leased'
                     and l.lease_expires_at_ms > clock.now_ms)
       end as leased,
       case when not (:counts_all::boolean or coalesce(p.active_concurrency_cap, 0) > 0) then 0
            else (select count(*)
                    from claim_grant c
                    join gate_route r on r.route_id = c.route_id and r.gate_id = g.gate_id
                   cross join lateral (
                        select
                          from live l
                         where l.partition_key = c.partition_key
                           and l.execution_id = c.execution_id
                           and l.granted_until_ms = c.expires_at_ms
                         limit 1) as kept
                   where c.expires_at_ms >= clock.now_ms)
       end as granted,
       case when p.while_suspended = 'keep'
                 and (:counts_all::boolean or p.active_concurrency_cap > 0)
            then (select count(*)
                    from gate_route r
                   cross join lateral (
                        select
                          from live l
                         where l.route_id = r.route_id
                           and l.ready
                           and l.public_state = 'waiting'
                           and l.attempt_state = 'attempt_interrupted'
                        union all
                        select
                          from live l
                         where l.route_id = r.route_id
                           and l.public_state in (
                                   'suspended', 'resumable', 'waiting', 'delayed', 'rate_limited',
                                   'waiting_children')
                           and not (l.ready and l.public_state = 'waiting')
                           and l.attempt_state = 'attempt_interrupted'
                           and coalesce(l.granted_until_ms < clock.now_ms, true)
                        offset 0) as goes_on
                   where r.gate_id = g.gate_id)
            else 0
       end as kept,
       case when not (:counts_all::boolean or coalesce(p.active_concurrency_cap, 0) > 0) then 0
            else (select count(*)
                    from admission a
                   cross join lateral (
                        select
                          from live l
                         where l.partition_key = a.partition_key
                           and l.execution_id = a.execution_id
                           and coalesce(l.replay_count, 0) = a.replay_count
                         limit 1) as goes_on
                   where a.gate_id = g.gate_id)
       end as admitted,
       clock.now_ms
  from clock
 cross join unnest(:gate_ids::uuid[]) as wanted (gate_id)
  join gate g on g.gate_id = wanted.gate_id
  left join quota_policy p on p.quota_policy_id = g.owner_id and g.owner_kind = 'quota';

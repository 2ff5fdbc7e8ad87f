-- What gates limit, and how much of each is held: by live leases, by grants not used yet, by
-- admissions and, where the policy keeps slots, by what goes on with an attempt later. Lock those that
-- limit anything by a statement of its own before, so that this one sees what others have claimed
-- meanwhile. No more of each kind than `counted_max` are counted, unless that is null. Gates without a
-- cap, and those that know how many slots they have to spare, are counted only if told.
--
-- A gate of few routes is counted route by route, one of many by walking through all leases.
with clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), any_held as materialized (
    select exists (select from claim_grant) as by_grants, exists (select from admission) as by_hand
)
select g.gate_id::text as gate_id, g.owner_kind, g.owner_id::text as owner_id, g.gate_key, g.starts,
       g.opens_at_ms, g.closed, g.spare, coalesce(p.window_ms, 0) as window_ms,
       coalesce(p.max_requests_per_window, 0) as rate,
       coalesce(p.active_concurrency_cap, 0) as cap, coalesce(p.jitter_ms, 0) as jitter_ms,
       coalesce(p.while_suspended = 'keep', false) as keeps,
       p.quota_policy_id is not null as has_policy,
       counted.is_so as counted, coalesce(cardinality(passed.route_ids) >= 33, false) as has_many_routes,
       case when not counted.is_so then 0
            when coalesce(cardinality(passed.route_ids), 0) < 33
            then (select count(*)
                    from (select
                            from unnest(passed.route_ids) as r (route_id)
                           cross join lateral (
                                select
                                  from live l
                                 where l.route_id = r.route_id
                                   and l.public_state = 'active'
                                   and not (l.ready and l.public_state = 'waiting')
                                   and l.ownership_state = 'leased'
                                   and l.lease_expires_at_ms > clock.now_ms
                                -- The planner would walk through all leases for each gate.
                                offset 0) as held
                           limit :counted_max::bigint) as found)
            else (select count(*)
                    from live l
                    join gate_route r on r.route_id = l.route_id and r.gate_id = g.gate_id
                   where l.lifecycle_phase = 'active'
                     and l.ownership_state = 'leased'
                     and l.lease_expires_at_ms > clock.now_ms)
       end
     + case when not (counted.is_so and (select by_grants from any_held)) then 0
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
       end
     + case when counted.is_so and p.while_suspended = 'keep'
            then (select count(*)
                    from (select
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
                                  from unnest(
                                        '{suspended,resumable,waiting,delayed,rate_limited,'
                                        'waiting_children}'::public_state[]) as s (public_state)
                                 cross join lateral (
                                    select
                                      from live l
                                     where l.route_id = r.route_id
                                       and l.public_state = s.public_state
                                       and not (l.ready and l.public_state = 'waiting')
                                       and l.attempt_state = 'attempt_interrupted'
                                       and coalesce(l.granted_until_ms < clock.now_ms, true)
                                     -- In order: a bitmap would be made of all of them.
                                     order by l.created_at_ms, l.execution_id
                                     limit :counted_max::bigint) as later
                                offset 0) as goes_on
                           where r.gate_id = g.gate_id
                           limit :counted_max::bigint) as found)
            else 0
       end
     + case when not (counted.is_so and (select by_hand from any_held)) then 0
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
       end as in_use,
       clock.now_ms
  from clock
 cross join unnest(:gate_ids::uuid[]) as wanted (gate_id)
  join gate g on g.gate_id = wanted.gate_id
  left join quota_policy p on p.quota_policy_id = g.owner_id and g.owner_kind = 'quota'
 cross join lateral (
    select :counts_all::boolean or (coalesce(p.active_concurrency_cap, 0) > 0 and g.spare is null)
               as is_so
    offset 0) as counted
 cross join lateral (
    select array_agg(few.route_id) as route_ids
      from (select r.route_id
              from gate_route r
             where r.gate_id = g.gate_id and counted.is_so
             limit 33) as few) as passed;

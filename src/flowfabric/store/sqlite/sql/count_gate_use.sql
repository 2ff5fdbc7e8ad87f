-- What gates limit, and how much of each is held: by live leases, by grants not used yet, by
-- admissions and, where the policy keeps slots, by what goes on with an attempt later. No more of each
-- kind than `counted_max` are counted, unless that is null. Gates without a cap, and those that know how
-- many slots they have to spare, are counted only if told.
--
-- A gate of few routes is counted route by route, one of many by walking through all leases.
select g.gate_id, g.owner_kind, g.owner_id, g.gate_key, g.starts, g.opens_at_ms, g.closed, g.spare,
       coalesce(p.window_ms, 0) as window_ms, coalesce(p.max_requests_per_window, 0) as rate,
       coalesce(p.active_concurrency_cap, 0) as cap, coalesce(p.jitter_ms, 0) as jitter_ms,
       coalesce(p.while_suspended = 'keep', 0) as keeps,
       p.quota_policy_id is not null as has_policy,
       counted.is_so as counted, counted.routes >= 33 as has_many_routes,
       case when not counted.is_so then 0
            when counted.routes < 33
            then (select count(*)
                    from (select 1
                            from gate_route as r
                           cross join live as l
                              on l.route_id = r.route_id
                             and l.public_state = 'active'
                             and not (l.ready and l.public_state = 'waiting')
                             and l.ownership_state = 'leased'
                             and l.lease_expires_at_ms > :clock
                           where r.gate_id = g.gate_id
                           limit coalesce(:counted_max, -1)))
            else (select count(*)
                    from live as l
                   cross join gate_route as r on r.gate_id = g.gate_id and r.route_id = l.route_id
                   where l.lifecycle_phase = 'active'
                     and l.ownership_state = 'leased'
                     and l.lease_expires_at_ms > :clock)
       end
     + case when not counted.is_so then 0
            else (select count(*)
                    from claim_grant as c
                   cross join gate_route as r on r.gate_id = g.gate_id and r.route_id = c.route_id
                   cross join live as l
                      on l.execution_rowid = (
                          select k.execution_rowid from execution k
                           where k.partition_key = c.partition_key and k.execution_id = c.execution_id)
                   where c.expires_at_ms >= :clock
                     and l.granted_until_ms = c.expires_at_ms)
       end
     + case when counted.is_so and p.while_suspended = 'keep'
            then (select count(*)
                    from (select 1
                            from gate_route as r
                           cross join live as l
                              on l.route_id = r.route_id
                             and l.ready
                             and l.public_state = 'waiting'
                             and l.attempt_state = 'attempt_interrupted'
                           where r.gate_id = g.gate_id
                           limit coalesce(:counted_max, -1)))
                 + (select count(*)
                      from (select 1
                              from gate_route as r
                             cross join live as l
                                on l.route_id = r.route_id
                               and l.public_state in ('suspended', 'resumable', 'waiting',
                                                      'delayed', 'rate_limited',
                                                      'waiting_children')
                               and not (l.ready and l.public_state = 'waiting')
                               and l.attempt_state = 'attempt_interrupted'
                               and coalesce(l.granted_until_ms < :clock, 1)
                             where r.gate_id = g.gate_id
                             limit coalesce(:counted_max, -1)))
            else 0
       end
     + case when not counted.is_so then 0
            else (select count(*)
                    from admission as a
                   cross join live as l
                      on l.execution_rowid = (
                          select k.execution_rowid from execution k
                           where k.partition_key = a.partition_key and k.execution_id = a.execution_id)
                   where a.gate_id = g.gate_id
                     and l.replay_count = a.replay_count)
       end as in_use,
       :clock as now_ms
  from (
    select g.gate_id as counted_id, is_so,
           case when is_so
                then (select count(*)
                        from (select 1 from gate_route as r where r.gate_id = g.gate_id limit 33))
                else 0
           end as routes
      from (
        select g.gate_id,
               :counts_all or (coalesce(p.active_concurrency_cap, 0) > 0 and g.spare is null) as is_so
          from json_each(:gate_ids) as wanted
         cross join gate as g on g.gate_id = wanted.value
          left join quota_policy as p on p.quota_policy_id = g.owner_id and g.owner_kind = 'quota'
      ) as g
  ) as counted
 cross join gate as g on g.gate_id = counted.counted_id
  left join quota_policy as p on p.quota_policy_id = g.owner_id and g.owner_kind = 'quota';

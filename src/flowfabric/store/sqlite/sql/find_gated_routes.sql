-- Routes under limits with ready work that a worker can do, by id after one, at most `limit` of them;
-- with their gates. The last row has all gates that may be asked, the largest of their caps, how far it
-- has looked unless to the end, and, where nothing fits, when the next window opens.
--
-- Leaps from the next route with ready work to the next one that the worker serves, and looks at that
-- one, in three steps each; so neither idle keys nor those of others cost anything. Passes over what
-- does not fit by what can be seen.
with recursive step (phase, route_id, ready_id, wanted_id, fits, steps, taken) as (
    select 0, :after, null, null, 0, 0, 0
    union all
    select (phase + 1) % 3,
           case when phase < 2 then route_id
                when wanted_id = ready_id then ready_id
                else wanted_id - 1
           end,
           case phase when 0 then min(
                    coalesce((
                        select x.route_id from live as x
                         where x.ready and x.public_state = 'waiting' and x.route_id > step.route_id
                         order by x.route_id limit 1), 9223372036854775807),
                    coalesce((
                        select x.route_id from live as x
                         where x.ready and x.public_state = 'active' and x.route_id > step.route_id
                         order by x.route_id limit 1), 9223372036854775807))
                else ready_id
           end,
           case phase when 1 then coalesce(
                    (select r.route_id
                       from route as r
                      cross join lane on lane.lane_id = r.lane_id
                      where r.route_id = step.ready_id
                        and r.gated
                        and (:kinds is null
                             or r.execution_kind in (select value from json_each(:kinds)))
                        and r.lane_id in (select value from json_each(:lanes))
                        and lane.state in ('active', 'draining')),
                    case when :kinds is null
                         then (select r.route_id
                                 from route as r
                                where r.route_id > step.ready_id
                                  and r.gated
                                  and r.lane_id in (select value from json_each(:lanes))
                                order by r.route_id
                                limit 1)
                         else (select min((
                                    select r.route_id
                                      from route as r
                                     where r.execution_kind = kind.value
                                       and r.lane_id = lane.lane_id
                                       and r.gated = 1
                                       and r.route_id > step.ready_id
                                     order by r.route_id
                                     limit 1))
                                 from json_each(:kinds) as kind
                                cross join json_each(:lanes) as wanted
                                cross join lane
                                   on lane.lane_id = wanted.value
                                  and lane.state in ('active', 'draining'))
                    end)
                else wanted_id
           end,
           phase = 2 and wanted_id = ready_id and exists (
                select 1
                  from route as r
                 where r.route_id = step.ready_id
                   and (:namespace is null or r.namespace = :namespace)
                   and not exists (
                        select 1 from json_each(r.required_capabilities) as need
                         where need.value not in (select value from json_each(:capabilities))))
            and not exists (
                select 1
                  from gate_route as p
                 cross join gate as g on g.gate_id = p.gate_id
                  left join quota_policy as q
                    on q.quota_policy_id = g.owner_id and g.owner_kind = 'quota'
                 where p.route_id = step.ready_id
                   and (g.closed
                        -- Later than that it was before the clock was set back.
                        or (g.opens_at_ms > :clock
                            and g.opens_at_ms <= :clock + 2 * coalesce(q.window_ms, 0)
                            and not exists (
                                select 1
                                  from live as x
                                 where x.route_id = step.ready_id
                                   and x.ready
                                   and x.public_state = 'waiting'
                                   and x.attempt_state = 'attempt_interrupted'))
                        -- What takes longer to count is left to who asks the gates.
                        or (q.active_concurrency_cap between 1 and 100
                            and g.gate_key <> ''
                            and not (q.while_suspended = 'keep' and exists (
                                select 1
                                  from live as x
                                 where x.route_id = step.ready_id
                                   and x.ready
                                   and x.public_state = 'waiting'
                                   and x.attempt_state = 'attempt_interrupted'))
                            and (select count(*)
                                   from (select 1
                                           from live as x
                                          where x.route_id = step.ready_id
                                            and x.public_state = 'active'
                                            and not (x.ready and x.public_state = 'waiting')
                                            and x.ownership_state = 'leased'
                                            and x.lease_expires_at_ms > :clock
                                          limit 100))
                                + case when q.while_suspended = 'keep'
                                       then (select count(*)
                                               from (select 1
                                                       from live as x
                                                      where x.route_id = step.ready_id
                                                        and x.public_state in (
                                                                'suspended', 'delayed',
                                                                'waiting_children')
                                                        and not (x.ready
                                                                 and x.public_state = 'waiting')
                                                        and x.attempt_state = 'attempt_interrupted'
                                                      limit 100))
                                       else 0
                                  end
                                >= q.active_concurrency_cap))),
           steps + (phase = 2), taken + fits
      from step
     where (phase = 0 or ready_id < 9223372036854775807)
       and (phase < 2 or wanted_id is not null)
       and steps < :steps_max
       and taken + fits < :limit
), found as materialized (
    select route_id,
           max(coalesce((
                    select x.priority from live as x
                     where x.route_id = step.route_id and x.ready and x.public_state = 'waiting'
                     order by x.priority desc limit 1), 0),
               coalesce((
                    select x.priority from live as x
                     where x.route_id = step.route_id and x.ready and x.public_state = 'active'
                     order by x.priority desc limit 1), 0)) as priority,
           exists (
                select 1 from live as x
                 where x.route_id = step.route_id
                   and x.ready
                   and x.public_state = 'waiting'
                   and x.attempt_state = 'attempt_interrupted') as resumes
      from step
     where phase = 0 and fits
)
select route_id, priority, resumes,
       (select json_group_array(p.gate_id) from gate_route as p where p.route_id = found.route_id)
           as gate_ids,
       null as cap_max, null as looked_at, null as steps, null as opens_at_ms
  from found
union all
select null, null, null,
       (select json_group_array(gate_id)
          from (select distinct p.gate_id
                  from found cross join gate_route as p on p.route_id = found.route_id)),
       (select max(q.active_concurrency_cap)
          from found
         cross join gate_route as p on p.route_id = found.route_id
         cross join gate as g on g.gate_id = p.gate_id and g.owner_kind = 'quota'
         cross join quota_policy as q on q.quota_policy_id = g.owner_id),
       case when (select max(taken + fits) < :limit and max(steps) < :steps_max from step)
            then null else (select max(route_id) from step where phase = 0) end,
       (select max(steps) from step),
       case when not exists (select 1 from found)
            then (select min(g.opens_at_ms)
                    from step
                   cross join gate_route as p on p.route_id = step.route_id
                   cross join gate as g on g.gate_id = p.gate_id
                   where step.phase = 0 and g.opens_at_ms > :clock)
       end;

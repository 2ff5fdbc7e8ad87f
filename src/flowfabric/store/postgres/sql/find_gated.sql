-- Routes under limits with ready work that a worker can do, by id after one, at most `limit` of them;
-- with their gates, which are locked where they limit anything. The last row has all gates that may be
-- asked, how far it has looked unless to the end, and, where nothing fits, when the next window opens.
--
-- Leaps from the next route with ready work to the next one that the worker serves and back, so that
-- neither idle keys nor those of others cost anything. Passes over what does not fit by what can be
-- seen: who has the gates locked finds out what is true. Where others are at a key, it is passed over
-- as well; gates without a key are waited for, in the order of their ids.
--
-- `offset 0` has a step computed once: the planner would put it wherever its result is used.
with recursive clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), served as materialized (
    select kind.execution_kind, lane.lane_id
      from lane
     cross join unnest(:kinds::text[]) as kind (execution_kind)
     where lane.lane_id = any(:lanes::text[])
       and lane.state in ('active', 'draining')
), step as (
    select :after::integer as route_id, false as fits, 0 as steps, 0 as taken
    union all
    select next.route_id, next.fits, step.steps + 1, step.taken + next.fits::integer
      from step
     cross join lateral (
        select least(
                   (select l.route_id
                      from live l
                     where l.ready and l.public_state = 'waiting' and l.route_id > step.route_id
                     order by l.route_id
                     limit 1),
                   (select l.route_id
                      from live l
                     where l.ready and l.public_state = 'active' and l.route_id > step.route_id
                     order by l.route_id
                     limit 1)) as route_id
        offset 0
     ) as ready
     cross join lateral (
        select coalesce(
                   (select r.route_id
                      from route r
                      join lane on lane.lane_id = r.lane_id
                     where r.route_id = ready.route_id
                       and r.gated
                       and (:kinds::text[] is null or r.execution_kind = any(:kinds::text[]))
                       and r.lane_id = any(:lanes::text[])
                       and lane.state in ('active', 'draining')),
                   case when :kinds::text[] is null
                        then (select r.route_id
                                from route r
                               where r.route_id > ready.route_id
                                 and r.gated
                                 and r.lane_id = any(:lanes::text[])
                               order by r.route_id
                               limit 1)
                        else (select min(follows.route_id)
                                from served
                               cross join lateral (
                                    select r.route_id
                                      from route r
                                     where r.execution_kind = served.execution_kind
                                       and r.lane_id = served.lane_id
                                       and r.gated
                                       and r.route_id > ready.route_id
                                     order by r.route_id
                                     limit 1) as follows)
                   end) as route_id
        offset 0
     ) as wanted
     cross join lateral (
        select case when wanted.route_id = ready.route_id then ready.route_id
                    else wanted.route_id - 1 end as route_id,
               wanted.route_id = ready.route_id and exists (
                    select
                      from route r
                     where r.route_id = ready.route_id
                       and (:namespace::text is null or r.namespace = :namespace)
                       and r.required_capabilities <@ :capabilities::text[])
                and not exists (
                    select
                      from gate_route p
                      join gate g on g.gate_id = p.gate_id
                      left join quota_policy q
                        on q.quota_policy_id = g.owner_id and g.owner_kind = 'quota'
                     where p.route_id = ready.route_id
                       and (g.closed
                            -- Later than that it was before the clock was set back.
                            or (g.opens_at_ms > (select now_ms from clock)
                                and g.opens_at_ms
                                        <= (select now_ms from clock) + 2 * coalesce(q.window_ms, 0)
                                and (select true
                                       from live l
                                      where l.route_id = ready.route_id
                                        and l.ready
                                        and l.public_state = 'waiting'
                                        and l.attempt_state = 'attempt_interrupted'
                                      limit 1) is null)
                            or (q.active_concurrency_cap > 0
                                and g.gate_key <> ''
                                and not (q.while_suspended = 'keep' and exists (
                                    select
                                      from live l
                                     where l.route_id = ready.route_id
                                       and l.ready
                                       and l.public_state = 'waiting'
                                       and l.attempt_state = 'attempt_interrupted'))
                                and (select count(*)
                                       from (select
                                               from live l
                                              where l.route_id = ready.route_id
                                                and l.public_state = 'active'
                                                and not (l.ready and l.public_state = 'waiting')
                                                and l.ownership_state = 'leased'
                                                and l.lease_expires_at_ms
                                                        > (select now_ms from clock)
                                              limit q.active_concurrency_cap) as held)
                                    + case when q.while_suspended = 'keep'
                                           then (select count(*)
                                                   from (select
                                                           from live l
                                                          where l.route_id = ready.route_id
                                                            and l.public_state in (
                                                                    'suspended', 'delayed',
                                                                    'waiting_children')
                                                            and not (l.ready
                                                                     and l.public_state = 'waiting')
                                                            and l.attempt_state
                                                                    = 'attempt_interrupted'
                                                          limit q.active_concurrency_cap) as kept)
                                           else 0
                                      end
                                    >= q.active_concurrency_cap))) as fits
        offset 0
     ) as next
     where ready.route_id is not null
       and wanted.route_id is not null
       and step.steps < :steps_max::integer
       and step.taken < :limit::bigint
), found as materialized (
    select step.route_id,
           greatest(
               (select l.priority
                  from live l
                 where l.route_id = step.route_id and l.ready and l.public_state = 'waiting'
                 order by l.priority desc
                 limit 1),
               (select l.priority
                  from live l
                 where l.route_id = step.route_id and l.ready and l.public_state = 'active'
                 order by l.priority desc
                 limit 1)) as priority,
           -- One row is asked for: `exists` may be planned as reading all that resume.
           (select true
              from live l
             where l.route_id = step.route_id
               and l.ready
               and l.public_state = 'waiting'
               and l.attempt_state = 'attempt_interrupted'
             limit 1) is not null as resumes
      from step
     where step.fits
), passed as materialized (
    select p.gate_id
      from found
     cross join lateral (select gate_id from gate_route where route_id = found.route_id) as p
), shared as materialized (
    select g.gate_id
      from gate g
     where g.gate_id = any(array(select gate_id from passed))
       and g.owner_kind = 'quota'
       and g.gate_key = ''
     order by g.gate_id
       for no key update
), keyed as materialized (
    select g.gate_id
      from gate g
     where g.gate_id = any(array(select gate_id from passed))
       and g.owner_kind = 'quota'
       and g.gate_key <> ''
     order by g.gate_id
       for no key update skip locked
), asked as materialized (
    select gate_id from shared
    union all
    select gate_id from keyed
    union all
    select g.gate_id
      from gate g
     where g.gate_id = any(array(select gate_id from passed))
       and g.owner_kind <> 'quota'
)
select found.route_id, found.priority, found.resumes,
       (select json_agg(p.gate_id)::text from gate_route p where p.route_id = found.route_id)
           as gate_ids,
       null::integer as looked_at, null::integer as steps, null::bigint as opens_at_ms
  from found
union all
select null, null, null, (select json_agg(asked.gate_id)::text from asked),
       case when (select max(step.taken) < :limit::bigint and max(step.steps) < :steps_max::integer
                    from step)
            then null else (select max(step.route_id) from step) end,
       (select max(step.steps) from step),
       case when not exists (select from found)
            then (select min(g.opens_at_ms)
                    from step
                    join gate_route p on p.route_id = step.route_id
                    join gate g on g.gate_id = p.gate_id
                   where g.opens_at_ms > (select now_ms from clock))
       end;

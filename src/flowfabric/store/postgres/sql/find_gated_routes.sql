-- Routes under limits with ready work that a worker can do, by id after one, at most `limit` of them;
-- with their gates, which are locked where they limit anything. The last row has all gates that may be
-- asked, the largest of their caps, how far it has looked unless to the end, and, where nothing fits,
-- when the next window opens.
--
-- Leaps from the next route with ready work to the next one that the worker serves and back, so that
-- neither idle keys nor those of others cost anything. Passes over what does not fit by what can be
-- seen: who has the gates locked finds out what is true. Where others are at a key, it is passed over
-- as well; gates without a key are waited for, in the order of their ids.
--
-- A step looks at each index once at most: the head of a queue tells the best priority with the route,
-- and the next route with lost work is looked for again only once it is passed.
--
-- `offset 0` has a step computed once: the planner would put it wherever its result is used.
with recursive clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), open as materialized (
    select array(select lane_id
                   from lane
                  where lane_id = any(:lanes::text[]) and state in ('active', 'draining')) as lanes
), served as materialized (
    select kind.execution_kind, lane.lane_id
      from unnest((select lanes from open)) as lane (lane_id)
     cross join unnest(:kinds::text[]) as kind (execution_kind)
), step as (
    select :after::integer as route_id, 0 as lost_id, 0 as priority, false as fits, 0 as steps,
           0 as taken, null::uuid[] as shared, null::uuid[] as keyed, null::uuid[] as others,
           null::bigint as cap
    union all
    select next.route_id, ahead.lost_id, next.priority, next.fits, step.steps + 1,
           step.taken + next.fits::integer, asked.shared, asked.keyed, asked.others,
           asked.cap
      from step
     cross join lateral (
        select waiting.route_id as waiting_id, waiting.priority,
               case when step.lost_id > step.route_id then step.lost_id
                    else coalesce(
                        (select l.route_id
                           from live l
                          where l.ready and l.public_state = 'active' and l.route_id > step.route_id
                          order by l.route_id
                          limit 1),
                        2147483647)
               end as lost_id
          from (select) as one
          left join lateral (
            select l.route_id, l.priority
              from live l
             where l.ready and l.public_state = 'waiting' and l.route_id > step.route_id
             order by l.route_id, l.priority desc
             limit 1) as waiting on true
        offset 0
     ) as ahead
     cross join lateral (
        select nullif(least(ahead.waiting_id, ahead.lost_id), 2147483647) as route_id
        offset 0
     ) as ready
      left join lateral (
        select (:namespace::text is null or r.namespace = :namespace)
                   and r.required_capabilities <@ :capabilities::text[] as can_be_done
          from route r
         where r.route_id = ready.route_id
           and r.gated
           and (:kinds::text[] is null or r.execution_kind = any(:kinds::text[]))
           and r.lane_id = any((select lanes from open)::text[])
         limit 1
     ) as own on true
     cross join lateral (
        select case when own.can_be_done is not null then ready.route_id
                    when :kinds::text[] is null
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
               end as route_id
        offset 0
     ) as wanted
     cross join lateral (
        select array_agg(p.gate_id) filter (where g.owner_kind = 'quota' and g.gate_key = '')
                   as shared,
               array_agg(p.gate_id) filter (where g.owner_kind = 'quota' and g.gate_key <> '')
                   as keyed,
               array_agg(p.gate_id) filter (where g.owner_kind is distinct from 'quota') as others,
               max(q.active_concurrency_cap) as cap,
               bool_or(
                    g.closed
                    -- Later than that it was before the clock was set back.
                    or (coalesce(g.opens_at_ms > (select now_ms from clock), false)
                        and g.opens_at_ms
                                <= (select now_ms from clock) + 2 * coalesce(q.window_ms, 0)
                        and (select true
                               from live l
                              where l.route_id = ready.route_id
                                and l.ready
                                and l.public_state = 'waiting'
                                and l.attempt_state = 'attempt_interrupted'
                              limit 1) is null)
                    -- What takes longer to count is left to who has the gates locked.
                    or (coalesce(q.active_concurrency_cap between 1 and 100, false)
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
                                        and l.lease_expires_at_ms > (select now_ms from clock)
                                      limit q.active_concurrency_cap) as held)
                            + case when q.while_suspended = 'keep'
                                   then (select count(*)
                                           from unnest(
                                                    '{suspended,delayed,waiting_children}'
                                                    ::public_state[]) as s (public_state)
                                          cross join lateral (
                                                select
                                                  from live l
                                                 where l.route_id = ready.route_id
                                                   and l.public_state = s.public_state
                                                   and not (l.ready and l.public_state = 'waiting')
                                                   and l.attempt_state = 'attempt_interrupted'
                                                 -- In order: a bitmap would be made of all of them.
                                                 order by l.created_at_ms, l.execution_id
                                                 limit q.active_concurrency_cap) as kept)
                                   else 0
                              end
                            >= q.active_concurrency_cap)) as full_up
          from gate_route p
          left join lateral (select * from gate where gate_id = p.gate_id limit 1) as g on true
          left join lateral (
            select window_ms, active_concurrency_cap, while_suspended
              from quota_policy
             where quota_policy_id = g.owner_id and g.owner_kind = 'quota'
             limit 1) as q on true
         where p.route_id = ready.route_id
           and own.can_be_done
     ) as asked
     cross join lateral (
        select case when wanted.route_id = ready.route_id then ready.route_id
                    else wanted.route_id - 1 end as route_id,
               greatest(
                   case when ahead.waiting_id = ready.route_id then ahead.priority end,
                   case when ahead.lost_id = ready.route_id
                        then (select l.priority
                                from live l
                               where l.route_id = ready.route_id
                                 and l.ready
                                 and l.public_state = 'active'
                               order by l.priority desc
                               limit 1)
                   end) as priority,
               coalesce(own.can_be_done, false) and asked.full_up is not true as fits
        offset 0
     ) as next
     where ready.route_id is not null
       and wanted.route_id is not null
       and step.steps < :steps_max::integer
       and step.taken < :limit::bigint
), found as materialized (
    select step.route_id, step.priority, step.shared, step.keyed, step.others, step.cap,
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
), shared as materialized (
    select g.gate_id
      from gate g
     where g.gate_id = any(array(select distinct unnest(shared) from found))
     order by g.gate_id
       for no key update
), keyed as materialized (
    select g.gate_id
      from gate g
     where g.gate_id = any(array(select unnest(keyed) from found))
     order by g.gate_id
       for no key update skip locked
), asked as materialized (
    select gate_id from shared
    union all
    select gate_id from keyed
    union all
    select distinct unnest(others) from found
)
select found.route_id, found.priority, found.resumes,
       array_to_json(found.shared || found.keyed || found.others)::text as gate_ids,
       null::bigint as cap_max, null::integer as looked_at, null::integer as steps,
       null::bigint as opens_at_ms
  from found
union all
select null, null, null, (select json_agg(asked.gate_id)::text from asked),
       (select max(found.cap) from found),
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

-- The best ready execution that a worker can serve and no other claim is taking, locked.
--
-- Routes first, rows second, as in `claim_ready`. Some candidates are looked at without a lock, so
-- that those not chosen are left to others. With a route, which is under limits then, that one alone.
with candidate as materialized (
    select best.partition_key, best.execution_id, row_number() over () as place
      from (
        select best.*
          from (
            select * from route
             where execution_kind = any(:kinds::text[]) and lane_id = any(:lanes::text[])
               and gated = (:route_id::integer is not null)
            union all
            select * from route
             where :kinds::text[] is null and lane_id = any(:lanes::text[])
               and gated = (:route_id::integer is not null)
          ) as route
          join lane using (lane_id)
         cross join lateral (
            select *
              from (
                select e.partition_key, e.execution_id, e.priority, e.created_at_ms
                  from live e
                 where e.route_id = route.route_id
                   and e.ready
                   and e.public_state = 'waiting'
                 order by e.priority desc, e.created_at_ms, e.execution_id
                 limit :candidates::bigint
              ) as waiting
            union all
            select *
              from (
                select e.partition_key, e.execution_id, e.priority, e.created_at_ms
                  from live e
                 where e.route_id = route.route_id
                   and e.ready
                   and e.public_state = 'active'
                 order by e.priority desc, e.created_at_ms, e.execution_id
                 limit :candidates::bigint
              ) as lost
         ) best
         where (:namespace::text is null or route.namespace = :namespace)
           and route.required_capabilities <@ :capabilities::text[]
           and lane.state in ('active', 'draining')
           and (:route_id::integer is null or route.route_id = :route_id::integer)
         order by best.priority desc, best.created_at_ms, best.execution_id
         limit :candidates::bigint
      ) as best
)
select e.partition_key, e.execution_id
  from candidate c
  join live e on e.partition_key = c.partition_key and e.execution_id = c.execution_id
 where e.ready
 order by c.place
 limit 1
   for update of e skip locked;

-- How many ready executions of a route are claimed before this one, counting no further
-- than `limit`.
--
-- A select for each range of the queues: of those beside it, only the ones before it are
-- looked at.
select count(*) as ahead
  from (select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and public_state = 'waiting'
                   and priority > :priority
                 limit :limit) as waiting_above
        union all
        select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and public_state = 'waiting'
                   and priority = :priority
                   and (created_at_ms, execution_id) < (:created_at_ms, :execution_id)
                 limit :limit) as waiting_beside
        union all
        select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and public_state = 'active'
                   and priority > :priority
                 limit :limit) as lost_above
        union all
        select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and public_state = 'active'
                   and priority = :priority
                   and (created_at_ms, execution_id) < (:created_at_ms, :execution_id)
                 limit :limit) as lost_beside
         limit :limit) as counted;

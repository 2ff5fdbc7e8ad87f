-- How many ready executions of a route are claimed before this one, counting no further
-- than `limit`.
--
-- Two selects, because each is one range of the ready index: of those beside it, only
-- the ones before it are looked at.
select count(*) as ahead
  from (select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and priority > :priority
                 limit :limit) as above
        union all
        select 1
          from (select 1
                  from live
                 where route_id = :route_id
                   and ready
                   and priority = :priority
                   and (created_at_ms, execution_id) < (:created_at_ms, :execution_id)
                 limit :limit) as beside
         limit :limit) as counted;

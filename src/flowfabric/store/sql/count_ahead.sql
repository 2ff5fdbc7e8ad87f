-- How many ready executions of a route are claimed before this one, counting no further
-- than `limit`.
select count(*) as ahead
  from (select 1
          from execution
         where route_id = :route_id
           and ready
           and priority >= :priority
           and (priority > :priority
                or created_at_ms < :created_at_ms
                or (created_at_ms = :created_at_ms and execution_id < :execution_id))
         limit :limit) as counted;

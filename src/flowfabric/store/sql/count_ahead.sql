-- How many ready executions of a route go before one of this priority and age, counting
-- no further than `limit`.
select count(*) as ahead
  from (select 1
          from execution
         where route_id = :route_id
           and ready
           and priority >= :priority
           and (priority > :priority or created_at_ms < :created_at_ms)
         limit :limit) as counted;

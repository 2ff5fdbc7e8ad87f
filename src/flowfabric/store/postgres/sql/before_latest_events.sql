-- The last id before the latest `limit` events of one namespace and category, or of all;
-- 0 when there are none.
with latest as (
    select event_id, cardinality(execution_id) as events
      from event
     where (:namespace::text is null or namespace = :namespace)
       and (:category::text is null or category = :category)
     order by event_id desc
     limit :limit::bigint
), counted as (
    select event_id, events, sum(events) over (order by event_id desc) as counted
      from latest
)
-- Of the oldest row that is needed, its last events may be enough.
select coalesce(min(event_id + greatest(counted - :limit::bigint, 0) - 1), 0)::bigint as event_id
  from counted
 where counted - events < :limit::bigint;

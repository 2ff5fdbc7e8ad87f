-- The last id before the latest `limit` events of one namespace and category, or of all;
-- 0 when there are none.
select coalesce(min(event_id) - 1, 0) as event_id
  from (select event_id
          from event
         where (cast(:namespace as text) is null or namespace = :namespace)
           and (cast(:category as text) is null or category = :category)
         order by event_id desc
         limit :limit) as latest;

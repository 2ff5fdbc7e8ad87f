-- The last id before the latest `limit` events of one namespace and category, or of all.
select min(event_id) - 1 as event_id
  from (select event_id
          from event
         where (cast(:namespace as text) is null or namespace = :namespace)
           and (cast(:category as text) is null or category = :category)
         order by event_id desc
         limit :limit) as latest;

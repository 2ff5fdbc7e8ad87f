-- Events after `after`, up to and including `through`, of one category or of all.
select *
  from event
 where event_id > :after
   and event_id <= :through
   and (cast(:category as text) is null or category = :category)
 order by event_id
 limit :limit

-- The next `window` events after `after`: the end of their unbroken run of ids, and their last id.
select cast(:after as bigint) + count(case when event_id = :after + place then 1 end) as unbroken,
       coalesce(max(event_id), cast(:after as bigint)) as last
  from (select event_id,
               row_number() over (order by event_id) as place
          from event
         where event_id > :after
         order by event_id
         limit :window) as next_events

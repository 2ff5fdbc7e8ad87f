-- Delete the oldest events, as far as all of them are as old as `before_ms`, and note how far.
update deployment
   set events_gone_through = coalesce((
    select max(event_id)
      from (select event_id, occurred_at_ms from event order by event_id limit :limit)
     where occurred_at_ms <= :before_ms), events_gone_through);
-- next
delete from event
 where event_id in (
    select event_id
      from (select event_id, occurred_at_ms from event order by event_id limit :limit)
     where occurred_at_ms <= :before_ms);
-- next
select changes() as trimmed;

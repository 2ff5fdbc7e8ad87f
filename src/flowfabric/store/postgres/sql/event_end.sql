-- The last id of the log, and the last before a number that is missing among the latest rows.
with latest as (
    select event_id, cardinality(execution_id) as events
      from event
     order by event_id desc
     limit 1000
), pairs as (
    select event_id, lag(event_id) over (order by event_id) as before,
           lag(events) over (order by event_id) as events_before
      from latest
)
select (select max(event_id + events - 1) from latest)::bigint as last_id,
       (select min(before + events_before - 1) from pairs
         where event_id > before + 4096)::bigint as before_gap;

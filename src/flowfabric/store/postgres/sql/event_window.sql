-- The rows after that of `after` until they hold `window` events: the last id of their unbroken
-- run, and of all.
with numbered as (
    select event_id, cardinality(execution_id) as events,
           row_number() over (order by event_id) as place
      from event
     where event_id > :after::bigint
     order by event_id
     limit :window::bigint
), following as (
    select event_id, event_id + events - 1 as last_id, place
      from (select *, sum(events) over (order by event_id) - events as before from numbered) as n
     where before < :window::bigint
), current as (
    -- The row that holds `after`, of which the rest may have been left for now.
    select event_id + cardinality(execution_id) - 1 as last_id
      from event
     where event_id = :after::bigint - :after::bigint % 4096
)
select greatest(
           :after::bigint,
           (select last_id from current),
           (select max(last_id) from following
             where event_id = :after::bigint - :after::bigint % 4096 + place * 4096)
       ) as unbroken,
       greatest(
           :after::bigint, (select last_id from current), (select max(last_id) from following)
       ) as last;

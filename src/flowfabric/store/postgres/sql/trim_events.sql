-- Delete the oldest events, as far as all of them are as old as `before_ms`.
with oldest as (
    select event_id, occurred_at_ms
      from event
     order by event_id
     limit :limit::bigint
), gone as (
    delete from event
     where event_id in (select event_id from oldest where occurred_at_ms <= :before_ms::bigint)
    returning 1
)
select count(*) as trimmed from gone;

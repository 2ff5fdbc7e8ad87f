-- Delete the oldest events, as far as all of them are as old as `before_ms`, and note how far.
with oldest as (
    select ctid as row_version, occurred_at_ms
      from event
     order by event_id
     limit :limit::bigint
), gone as (
    -- By place: as a join this may be planned as a walk over the table.
    delete from event
     where ctid = any(array(
        select row_version from oldest where occurred_at_ms <= :before_ms::bigint))
    returning event_id, cardinality(execution_id) as number
), noted as (
    update deployment as d
       set events_gone_through = greatest(d.events_gone_through, g.through)
      from (select max(event_id + number - 1) as through from gone) as g
     where g.through is not null
)
select coalesce(sum(number), 0)::bigint as trimmed from gone;

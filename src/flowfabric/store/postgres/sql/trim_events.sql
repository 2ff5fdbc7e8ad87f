-- Delete the oldest events, as far as all of them are as old as `before_ms`.
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
    returning cardinality(execution_id) as number
)
select coalesce(sum(number), 0)::bigint as trimmed from gone;

-- The event with this id, if there is one, the first and last id of the log, and how far
-- retention has come.
select (select event_id from event order by event_id limit 1) as first_id,
       (select event_id + cardinality(execution_id) - 1
          from event order by event_id desc limit 1) as last_id,
       (select events_gone_through from deployment) as gone_through,
       :event_id::bigint as event_id, held.occurred_at_ms, held.execution_id
  from (select) as always
  left join (
    select occurred_at_ms,
           execution_id[:event_id::bigint % 4096 + 1]::text as execution_id
      from event
     where event_id = :event_id::bigint - :event_id::bigint % 4096
  ) as held on true;

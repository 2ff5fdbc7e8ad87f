-- The event with this id, if there is one, and the first and last id of the log.
select (select min(event_id) from event) as first_id,
       (select max(event_id) from event) as last_id,
       :event_id as event_id, held.occurred_at_ms, held.execution_id
  from (select 1) as always
  left join (
    select occurred_at_ms, execution_id
      from event
     where event_id = :event_id
  ) as held on true;

-- The event with this id, if there is one, the first and last id of the log, and how far
-- retention has come.
select (select min(event_id) from event) as first_id,
       (select max(event_id) from event) as last_id,
       (select events_gone_through from deployment) as gone_through,
       :event_id as event_id, held.occurred_at_ms, held.execution_id
  from (select 1) as always
  left join (
    select occurred_at_ms, execution_id
      from event
     where event_id = :event_id
  ) as held on true;

-- The highest event id handed out and committed; null when the log is empty.
select max(event_id) as event_id
  from event;

-- The highest event id handed out and committed; 0 when the log is empty.
select coalesce(max(event_id), 0) as event_id
  from event;

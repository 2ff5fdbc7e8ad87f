-- The highest event id handed out and committed; 0 when the log is empty.
select coalesce(max(event_id + cardinality(execution_id) - 1), 0) as event_id
  from (select event_id, execution_id from event order by event_id desc limit 1) as last_row;

-- The highest event id handed out and committed; null when the log is empty.
select max(event_id + cardinality(execution_id) - 1) as event_id
  from (select event_id, execution_id from event order by event_id desc limit 1) as last_row;

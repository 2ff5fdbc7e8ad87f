-- The last event that is not younger than `at_ms`: the log is walked back from its end.
select event_id, occurred_at_ms, execution_id
  from event
 where occurred_at_ms <= :at_ms
 order by event_id desc
 limit 1;

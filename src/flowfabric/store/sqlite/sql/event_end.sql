-- The last id of the log. Writers take turns: no number below it is still to come.
select max(event_id) as last_id, null as before_gap, null as gap_first, null as gap_last
  from event;

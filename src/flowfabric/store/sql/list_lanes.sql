-- Lanes by name, after one.
select lane_id, state, registered_at_ms, registered_by, state_changed_at_ms
  from lane
 where lane_id > :after
 order by lane_id
 limit :limit;

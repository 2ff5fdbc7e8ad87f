-- Workers that asked for work lately.
select worker_instance_id, worker_id, namespace, lanes, kinds, capabilities, last_seen_ms
  from worker_presence
 where last_seen_ms > :seen_after_ms;

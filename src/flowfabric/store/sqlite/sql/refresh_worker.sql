-- Extend the life of a worker that is there; return what it serves.
--
-- Stands in for `core.workers.decide_heartbeat` in the sure case.
update worker
   set last_heartbeat_ms = :clock,
       expires_at_ms = :clock + liveness_ttl_ms
 where namespace = :namespace
   and worker_instance_id = :worker_instance_id
   and expires_at_ms > :clock
returning namespace, worker_instance_id, worker_id, lanes, kinds, capabilities,
          registered_at_ms, running_since_ms, last_heartbeat_ms, liveness_ttl_ms, expires_at_ms;

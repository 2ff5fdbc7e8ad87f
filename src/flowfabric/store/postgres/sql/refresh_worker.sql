-- Extend the life of a worker that is there; return what it serves.
--
-- Stands in for `core.workers.decide_heartbeat` in the sure case.
with clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
)
update worker
   set last_heartbeat_ms = clock.now_ms,
       expires_at_ms = clock.now_ms + liveness_ttl_ms
  from clock
 where namespace = :namespace
   and worker_instance_id = :worker_instance_id
   and expires_at_ms > clock.now_ms
returning namespace, worker_instance_id, worker_id, lanes, kinds, capabilities,
          registered_at_ms, running_since_ms, last_heartbeat_ms, liveness_ttl_ms, expires_at_ms;

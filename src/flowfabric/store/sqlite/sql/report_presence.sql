-- Note what a worker serves and that it was seen just now.
insert into worker_presence (
    worker_instance_id, worker_id, namespace, lanes, kinds, capabilities, last_seen_ms)
values (:worker_instance_id, :worker_id, :namespace, :lanes, :kinds, :capabilities, :clock)
    on conflict (worker_instance_id) do update
   set worker_id = excluded.worker_id,
       namespace = excluded.namespace,
       lanes = excluded.lanes,
       kinds = excluded.kinds,
       capabilities = excluded.capabilities,
       last_seen_ms = excluded.last_seen_ms;

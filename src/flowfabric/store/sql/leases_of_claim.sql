-- Executions of which a worker has a live lease whose id begins as given, by what it claimed them with.
-- It reads the rows of all leased executions to find them.
select l.partition_key, l.execution_id
  from live l
  join route r on r.route_id = l.route_id
 where l.lifecycle_phase = 'active'
   and l.ownership_state = 'leased'
   and l.worker_instance_id = :worker_instance_id
   and l.lease_expires_at_ms > :now_ms
   and cast(l.lease_id as text) like :lease_ids
   and (cast(:namespace as text) is null or r.namespace = :namespace)
 order by l.partition_key, l.execution_id
 limit :limit;

-- Leases past their end, noticed or not, longest overdue first.
--
-- Two selects, because each half is a range of the index, and each with its own limit, so that
-- neither reads further than the page.
with overdue as not materialized (
    select l.partition_key, l.execution_id, r.namespace, r.lane_id, l.lease_id, l.lease_epoch,
           l.current_attempt_index as attempt_index, l.worker_instance_id,
           l.lease_expires_at_ms as expires_at_ms, l.ownership_state
      from live l
      join route r on r.route_id = l.route_id
     where lifecycle_phase = 'active'
       and lease_expires_at_ms <= :as_of_ms
       and lease_expires_at_ms >= :after_ms
       and (l.lease_expires_at_ms, l.partition_key, l.execution_id)
           > (:after_ms, :after_partition, :after_id)
       and (cast(:namespace as text) is null or r.namespace = :namespace)
)
select partition_key, execution_id, namespace, lane_id, lease_id, lease_epoch, attempt_index,
       worker_instance_id, expires_at_ms
  from (select *
          from (select *
                  from overdue
                 where ownership_state = 'leased'
                 order by expires_at_ms, partition_key, execution_id
                 limit :limit) as unnoticed
        union all
        select *
          from (select *
                  from overdue
                 where ownership_state = 'lease_expired_reclaimable'
                 order by expires_at_ms, partition_key, execution_id
                 limit :limit) as noticed) as lost
 order by expires_at_ms, partition_key, execution_id
 limit :limit;

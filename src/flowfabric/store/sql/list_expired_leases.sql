-- Leases past their end, noticed or not, longest overdue first.
--
-- Two selects, because each half has an index of its own.
select partition_key, execution_id, lane_id, lease_id, lease_epoch, attempt_index,
       worker_instance_id, expired_at_ms
  from (select partition_key, execution_id, lane_id, lease_id, lease_epoch,
               current_attempt_index as attempt_index, worker_instance_id,
               lease_expires_at_ms as expired_at_ms
          from execution
         where ownership_state = 'leased'
           and lease_expires_at_ms <= :now_ms
        union all
        select partition_key, execution_id, lane_id, lease_id, lease_epoch,
               current_attempt_index, worker_instance_id, lease_expires_at_ms
          from execution
         where ownership_state = 'lease_expired_reclaimable'
           and lease_expires_at_ms <= :now_ms) as lost
 order by expired_at_ms
 limit :limit;

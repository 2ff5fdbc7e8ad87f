-- Executions whose lease is past its end, longest overdue first.
select partition_key, execution_id
  from live
 where lifecycle_phase = 'active'
   and ownership_state = 'leased'
   and lease_expires_at_ms <= :now_ms
-- within live
 order by lease_expires_at_ms
 limit :limit
   for update skip locked;

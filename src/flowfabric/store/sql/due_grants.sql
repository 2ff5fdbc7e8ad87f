-- Grants that were not used in time, longest overdue first.
select partition_key, execution_id
  from claim_grant
 where expires_at_ms < :now_ms
 order by expires_at_ms
 limit :limit;

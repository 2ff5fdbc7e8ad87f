-- What was fixed when this database was set up.
select num_flow_partitions, num_budget_partitions, num_quota_partitions, handle_key, created_at_ms
  from deployment

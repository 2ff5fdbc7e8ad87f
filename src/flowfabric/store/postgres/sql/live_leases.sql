-- Those of the given leases that are live.
select l.lease_id::text as lease_id
  from unnest(:partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[])
    as k (partition_key, execution_id, lease_id)
  join live as l
    on l.partition_key = k.partition_key
   and l.execution_id = k.execution_id
   and l.lease_id = k.lease_id
 where l.ownership_state = 'leased'
   and l.lease_expires_at_ms > :now_ms::bigint;

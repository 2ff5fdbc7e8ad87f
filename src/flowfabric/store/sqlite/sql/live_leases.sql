-- Those of the given leases that are live.
select l.lease_id
  from json_each(:rows) as k
 cross join live as l
    on l.partition_key = k.value ->> 'partition_keys'
   and l.execution_id = k.value ->> 'execution_ids'
   and l.lease_id = k.value ->> 'lease_ids'
 where l.ownership_state = 'leased'
   and l.lease_expires_at_ms > :now_ms;

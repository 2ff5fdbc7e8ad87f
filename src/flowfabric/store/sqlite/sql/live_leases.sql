-- Those of the given leases that are live.
select l.lease_id
  from json_each(:rows) as k
 cross join execution as x
    on x.partition_key = k.value ->> 'partition_keys'
   and x.execution_id = k.value ->> 'execution_ids'
 cross join live as l
    on l.execution_rowid = x.execution_rowid
   and l.lease_id = k.value ->> 'lease_ids'
 where l.ownership_state = 'leased'
   and l.lease_expires_at_ms > :now_ms;

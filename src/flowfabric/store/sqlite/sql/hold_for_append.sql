-- What an append asks of the given executions, and the time. No attempt ends meanwhile.
select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.lease_id,
       e.lease_epoch, e.lease_expires_at_ms, e.current_attempt_index, :clock as now_ms
  from json_each(:rows) as k
 cross join execution as x
    on x.partition_key = k.value ->> 'partition_keys'
   and x.execution_id = k.value ->> 'execution_ids'
 cross join live as e on e.execution_rowid = x.execution_rowid;

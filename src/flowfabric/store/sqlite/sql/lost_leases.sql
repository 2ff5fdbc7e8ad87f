-- The positions of the given leases that were taken away, or whose execution is gone.
--
-- Which of them ended by time, their holders know by themselves.
select g.key as position
  from json_each(:rows) as g
  left join execution as x
    on x.partition_key = g.value ->> 'partition_keys'
   and x.execution_id = g.value ->> 'execution_ids'
  left join live as e on e.execution_rowid = x.execution_rowid
 where e.lease_id is not g.value ->> 'lease_ids'
    or e.lifecycle_phase <> 'active'
    or e.ownership_state <> 'leased';

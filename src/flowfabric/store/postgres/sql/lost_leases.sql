-- The positions of the given leases that were taken away, or whose execution is gone.
--
-- Which of them ended by time, their holders know by themselves.
select g.position - 1 as position
  from unnest(:partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[])
           with ordinality as g (partition_key, execution_id, lease_id, position)
  left join lateral (
    select *
      from live
     where live.partition_key = g.partition_key
       and live.execution_id = g.execution_id
     limit 1
 ) e on true
 where e.lease_id is distinct from g.lease_id
    or e.lifecycle_phase <> 'active'
    or e.ownership_state <> 'leased';

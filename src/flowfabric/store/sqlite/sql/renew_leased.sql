-- Renew the given leases that are live; return the positions of those and their new end.
--
-- Stands in for `core.leases.decide_renew` in the sure case, as `complete_leased` does.
delete from temp.renewing;
-- next
insert into temp.renewing (execution_rowid, position, lease_ttl_ms)
select e.rowid, g.key, given('lease_ttls_ms', g.key)
  from json_each(:execution_ids) as g
 cross join execution as x
    on x.partition_key = given('partition_keys', g.key)
   and x.execution_id = g.value
 cross join live as e on e.execution_rowid = x.execution_rowid
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = given('lease_ids', g.key)
   and e.lease_expires_at_ms > :clock
    on conflict (execution_rowid) do nothing;
-- next
update live
   set lease_last_renewed_at_ms = :clock,
       lease_expires_at_ms = :clock + r.lease_ttl_ms,
       last_mutation_at_ms = :clock
  from temp.renewing as r
 where live.rowid = r.execution_rowid
   and live.rowid in (select execution_rowid from temp.renewing);
-- next
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, namespace, instance_tag, occurred_at_ms)
select 'lease', 'renewed', l.partition_key, l.execution_id, l.flow_id, l.lease_id, l.lease_epoch,
       l.current_attempt_index, l.worker_instance_id, route.namespace, l.instance_tag, :clock
  from temp.renewing as r
 cross join live as l on l.rowid = r.execution_rowid
 cross join route on route.route_id = l.route_id
 order by r.position;
-- next
select r.position, e.lease_expires_at_ms as expires_at_ms, e.lease_epoch
  from temp.renewing as r
 cross join live as e on e.rowid = r.execution_rowid;

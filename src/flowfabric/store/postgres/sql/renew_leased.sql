-- Renew the given leases that are live; return the positions of those and their new end.
--
-- Stands in for `core.leases.decide_renew` in the sure case, as `complete_leased` does. All
-- leases of a process are renewed at once, so a row that another transaction holds is left to
-- the caller: it must not hold up the others.
with given as materialized (
    select *
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[],
          :lease_ttls_ms::bigint[]
      ) with ordinality as g (partition_key, execution_id, lease_id, lease_ttl_ms, position)
), clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), free as materialized (
    select e.ctid as row_version, g.lease_ttl_ms, g.position
      from given g
      join live e on e.partition_key = g.partition_key and e.execution_id = g.execution_id
     where e.lease_id = g.lease_id
       and e.lease_expires_at_ms > (select now_ms from clock)
       and e.lease_expired_at_ms is null
       for no key update of e skip locked
), renewed as (
    update live e
       set lease_last_renewed_at_ms = (select now_ms from clock),
           lease_expires_at_ms = (select now_ms from clock) + g.lease_ttl_ms,
           last_mutation_at_ms = (select now_ms from clock)
      from free g
     -- The row is locked, so its version cannot change under us: no need to look it up again.
     where e.ctid = g.row_version
    returning e.partition_key, e.execution_id, e.flow_id, e.lease_id, e.lease_epoch,
              e.current_attempt_index, e.worker_instance_id, e.instance_tag,
              e.lease_expires_at_ms, e.route_id, g.position
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, worker_instance_id,
        partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index)
    select (select now_ms from clock), 'lease', 'renewed',
           (select r.namespace from route r where r.route_id = renewed.route_id), instance_tag,
           worker_instance_id, array_agg(partition_key), array_agg(execution_id),
           array_agg(flow_id), array_agg(lease_id), array_agg(lease_epoch),
           array_agg(coalesce(current_attempt_index, 0))
      from renewed
     group by route_id, instance_tag, worker_instance_id
)
select position - 1 as position, lease_expires_at_ms as expires_at_ms, lease_epoch from renewed;

-- Renew the given leases whose fence holds; return the positions of those and their new end.
--
-- Stands in for `core.lease.decide_renew` in the sure case, as `complete_leased` does.
with given as materialized (
    select *
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[],
          :lease_epochs::bigint[], :attempt_ids::uuid[], :attempt_indexes::int[],
          :lease_ttls_ms::bigint[]
      ) with ordinality as g (
          partition_key, execution_id, lease_id, lease_epoch, attempt_id, attempt_index,
          lease_ttl_ms, position)
), locked as materialized (
    -- By key alone: a condition on the state would invite the planner to walk one of the
    -- partial indexes, which looks empty to it and may hold every running execution.
    select e.ctid as row_version, e.lifecycle_phase, e.ownership_state,
           e.lease_expires_at_ms, e.lease_id, e.worker_instance_id, g.lease_ttl_ms, g.position,
           e.lease_id = g.lease_id
               and e.lease_epoch = g.lease_epoch
               and e.current_attempt_id = g.attempt_id
               and e.current_attempt_index = g.attempt_index as fence_matches
      from given g
      join execution e on e.partition_key = g.partition_key and e.execution_id = g.execution_id
     order by e.partition_key, e.execution_id
       for update of e
), clock as materialized (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
      from (select count(*) from locked) as after_locking
), renewed as (
    update execution e
       set lease_last_renewed_at_ms = clock.now_ms,
           lease_renewal_deadline_ms = clock.now_ms + l.lease_ttl_ms * 2 / 3,
           lease_expires_at_ms = clock.now_ms + l.lease_ttl_ms,
           last_mutation_at_ms = clock.now_ms
      from locked l, clock
     -- The row is locked, so its version cannot change under us: no need to look it up again.
     where e.ctid = l.row_version
       and l.lifecycle_phase = 'active'
       and l.ownership_state = 'leased'
       and l.fence_matches
       and l.lease_expires_at_ms > clock.now_ms
    returning e.partition_key, e.execution_id, e.flow_id, e.lease_id, e.lease_epoch,
              e.current_attempt_index, e.worker_instance_id, e.namespace, e.instance_tag,
              e.lease_expires_at_ms, l.position, clock.now_ms
), told as (
    insert into event (
        category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
        attempt_index, worker_instance_id, namespace, instance_tag, occurred_at_ms)
    select 'lease', 'renewed', partition_key, execution_id, flow_id, lease_id, lease_epoch,
           current_attempt_index, worker_instance_id, namespace, instance_tag, now_ms
      from renewed
     order by position
)
select position - 1 as position, lease_expires_at_ms as expires_at_ms, lease_epoch from renewed;

-- Events after `after`, up to and including `through`, of one category or of all.
select e.event_id + each.place - 1 as event_id, e.occurred_at_ms, e.category, e.event_type,
       each.partition_key, each.execution_id::text as execution_id,
       each.flow_id::text as flow_id, each.lease_id::text as lease_id, each.lease_epoch,
       each.attempt_index, e.worker_instance_id, e.reason, e.details, e.namespace, e.instance_tag
  from event e
 cross join lateral unnest(
    e.partition_key, e.execution_id, e.flow_id, e.lease_id, e.lease_epoch, e.attempt_index
 ) with ordinality as each (
    partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index, place)
 -- The row that holds the next event may have begun before it.
 where e.event_id > :after::bigint - 4096
   and e.event_id <= :through::bigint
   and e.event_id + each.place - 1 > :after::bigint
   and (:category::text is null or e.category = :category)
 order by e.event_id, each.place
 limit :limit::bigint;

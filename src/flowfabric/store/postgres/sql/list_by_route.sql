-- Executions by namespace, lane, kind and state, newest first.
--
-- What waits stands in queues, one for each route and priority; all else is one range of an index
-- for each route and state. So the page is merged from a few index scans whatever the filter is.
-- Ties are cut last: asked for the whole order, the planner may fetch every row of a range to
-- sort it.
with recursive wanted as materialized (
    select route.route_id, state.public_state
      from route
     cross join unnest(:states::text[]::public_state[]) as state (public_state)
     where (:namespace::text is null or route.namespace = :namespace)
       and (:lane_id::text is null or route.lane_id = :lane_id)
       and (:execution_kind::text is null or route.execution_kind = :execution_kind
            or substr(route.execution_kind, 1, length(:versions_of::text)) = :versions_of)
), queue as (
    select wanted.route_id,
           (select max(l.priority)
              from live l
             where l.route_id = wanted.route_id
               and l.ready
               and l.public_state = 'waiting') as priority
      from wanted
     where wanted.public_state = 'waiting'
    union all
    select q.route_id,
           (select max(l.priority)
              from live l
             where l.route_id = q.route_id
               and l.ready
               and l.public_state = 'waiting'
               and l.priority < q.priority)
      from queue q
     where q.priority is not null
), page as materialized (
    select x.*
      from (
        select w.*
          from queue
         cross join lateral (
            select partition_key, execution_id, created_at_ms
              from live
             where live.route_id = queue.route_id
               and live.ready
               and live.public_state = 'waiting'
               and live.priority = queue.priority
               and created_at_ms > :created_after_ms::bigint
               and created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
               and (created_at_ms < :before_ms::bigint
                    or (execution_id, partition_key) < (:before_id::uuid, :before_partition::int))
             order by created_at_ms desc, execution_id desc
             fetch first (:limit::bigint) rows with ties
         ) as w
        union all
        select l.*
          from wanted
         cross join lateral (
            select partition_key, execution_id, created_at_ms
              from live
             where live.route_id = wanted.route_id
               and live.public_state = wanted.public_state
               and not (live.ready and live.public_state = 'waiting')
               and created_at_ms > :created_after_ms::bigint
               and created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
               and (created_at_ms < :before_ms::bigint
                    or (execution_id, partition_key) < (:before_id::uuid, :before_partition::int))
             order by created_at_ms desc, execution_id desc
             fetch first (:limit::bigint) rows with ties
         ) as l
        union all
        select n.*
          from wanted
         cross join lateral (
            select partition_key, execution_id, created_at_ms
              from ending
             where ending.route_id = wanted.route_id
               and ending.public_state = wanted.public_state
               and created_at_ms > :created_after_ms::bigint
               and created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
               and (created_at_ms < :before_ms::bigint
                    or (execution_id, partition_key) < (:before_id::uuid, :before_partition::int))
             order by created_at_ms desc, execution_id desc
             fetch first (:limit::bigint) rows with ties
         ) as n
      ) as x
     order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
     limit :limit::bigint
)
select v.*
  from page
 cross join lateral (
    select *
      from execution_now
     where execution_now.partition_key = page.partition_key
       and execution_now.execution_id = page.execution_id
     limit 1
 ) v
 order by v.created_at_ms desc, v.execution_id desc, v.partition_key desc;

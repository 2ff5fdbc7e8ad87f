-- Executions by namespace, lane, kind and state, newest first.
--
-- What waits stands in queues, one for each route and priority; all else is one range of an index
-- for each route and state. So the page is merged from a few index scans whatever the filter is.
with recursive wanted as materialized (
    select route.route_id, state.value as public_state
      from route
     cross join json_each(:states) as state
     where (:namespace is null or route.namespace = :namespace)
       and (:lane_id is null or route.lane_id = :lane_id)
       and (:execution_kind is null or route.execution_kind = :execution_kind
            or substr(route.execution_kind, 1, length(:versions_of)) = :versions_of)
), queue as (
    select wanted.route_id,
           (select max(l.priority)
              from live as l
             where l.route_id = wanted.route_id
               and l.ready
               and l.public_state = 'waiting') as priority
      from wanted
     where wanted.public_state = 'waiting'
    union all
    select q.route_id,
           (select max(l.priority)
              from live as l
             where l.route_id = q.route_id
               and l.ready
               and l.public_state = 'waiting'
               and l.priority < q.priority)
      from queue as q
     where q.priority is not null
), page as materialized (
    select * from (
        select w.partition_key, w.execution_id, w.created_at_ms
          from queue
         cross join live as w on w.rowid in (
            select x.rowid
              from live as x
             where x.route_id = queue.route_id
               and x.ready
               and x.public_state = 'waiting'
               and x.priority = queue.priority
               and x.created_at_ms > :created_after_ms
               and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
               and (x.created_at_ms < :before_ms
                    or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
             order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
             limit :limit)
        union all
        select l.partition_key, l.execution_id, l.created_at_ms
          from wanted
         cross join live as l on l.rowid in (
            select x.rowid
              from live as x
             where x.route_id = wanted.route_id
               and x.public_state = wanted.public_state
               and not (x.ready and x.public_state = 'waiting')
               and x.created_at_ms > :created_after_ms
               and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
               and (x.created_at_ms < :before_ms
                    or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
             order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
             limit :limit)
        union all
        select n.partition_key, n.execution_id, n.created_at_ms
          from wanted
         cross join ending as n on n.rowid in (
            select x.rowid
              from ending as x
             where x.route_id = wanted.route_id
               and x.public_state = wanted.public_state
               and x.created_at_ms > :created_after_ms
               and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
               and (x.created_at_ms < :before_ms
                    or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
             order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
             limit :limit)
    )
     order by created_at_ms desc, execution_id desc, partition_key desc
     limit :limit
)
select v.*
  from page
 cross join execution_now as v
    on v.partition_key = page.partition_key and v.execution_id = page.execution_id
 order by page.created_at_ms desc, page.execution_id desc, page.partition_key desc;

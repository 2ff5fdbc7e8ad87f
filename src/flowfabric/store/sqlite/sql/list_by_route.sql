-- Executions by namespace, lane, kind and state, newest first.
--
-- Each (route, state) pair is one range of a list index, so the page is merged from
-- a few index scans whatever the filter is.
with page as materialized (
    select * from (
        select l.partition_key, l.execution_id, l.created_at_ms
          from route
         cross join json_each(:states) as wanted
         cross join live as l on l.rowid in (
            select x.rowid
              from live as x
             where x.route_id = route.route_id
               and x.public_state = wanted.value
               and x.created_at_ms > :created_after_ms
               and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
               and (x.created_at_ms < :before_ms
                    or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
             order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
             limit :limit)
         where (:namespace is null or route.namespace = :namespace)
           and (:lane_id is null or route.lane_id = :lane_id)
           and (:execution_kind is null or route.execution_kind = :execution_kind
                or substr(route.execution_kind, 1, length(:versions_of)) = :versions_of)
        union all
        select n.partition_key, n.execution_id, n.created_at_ms
          from route
         cross join json_each(:states) as wanted
         cross join ending as n on n.rowid in (
            select x.rowid
              from ending as x
             where x.route_id = route.route_id
               and x.public_state = wanted.value
               and x.created_at_ms > :created_after_ms
               and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
               and (x.created_at_ms < :before_ms
                    or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
             order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
             limit :limit)
         where (:namespace is null or route.namespace = :namespace)
           and (:lane_id is null or route.lane_id = :lane_id)
           and (:execution_kind is null or route.execution_kind = :execution_kind
                or substr(route.execution_kind, 1, length(:versions_of)) = :versions_of)
    )
     order by created_at_ms desc, execution_id desc, partition_key desc
     limit :limit
)
select v.*
  from page
 cross join execution_now as v
    on v.partition_key = page.partition_key and v.execution_id = page.execution_id
 order by page.created_at_ms desc, page.execution_id desc, page.partition_key desc;

-- Executions by lane, kind and state, newest first.
--
-- Each (route, state) pair is one range of the list index, so the page is merged from
-- a few index scans whatever the filter is.
select e.*
  from route
 cross join json_each(:states) as wanted
 cross join execution as e on e.rowid in (
    select x.rowid
      from execution as x
     where x.route_id = route.route_id
       and x.public_state = wanted.value
       and x.created_at_ms > :created_after_ms
       and x.created_at_ms <= min(:before_ms, :created_before_ms - 1)
       and (x.created_at_ms < :before_ms
            or (x.execution_id, x.partition_key) < (:before_id, :before_partition))
     order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
     limit :limit)
 where (:lane_id is null or route.lane_id = :lane_id)
   and (:execution_kind is null or route.execution_kind = :execution_kind
        or substr(route.execution_kind, 1, length(:versions_of)) = :versions_of)
 order by e.created_at_ms desc, e.execution_id desc, e.partition_key desc
 limit :limit;

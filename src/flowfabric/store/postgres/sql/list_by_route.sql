-- Executions by lane, kind and state, newest first.
--
-- Each (route, state) pair is one range of the list index, so the page is merged from
-- a few index scans whatever the filter is.
select e.*
  from route
 cross join unnest(:states::text[]) as wanted (public_state)
 cross join lateral (
    select *
      from execution x
     where x.route_id = route.route_id
       and x.public_state = wanted.public_state
       and x.created_at_ms > :created_after_ms::bigint
       and x.created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
       and (x.created_at_ms < :before_ms::bigint
            or (x.execution_id, x.partition_key) < (:before_id::uuid, :before_partition::int))
     order by x.created_at_ms desc, x.execution_id desc, x.partition_key desc
     limit :limit::bigint
 ) e
 where (:lane_id::text is null or route.lane_id = :lane_id)
   and (:execution_kind::text is null or route.execution_kind = :execution_kind
        or substr(route.execution_kind, 1, length(:versions_of::text)) = :versions_of)
 order by e.created_at_ms desc, e.execution_id desc, e.partition_key desc
 limit :limit::bigint;

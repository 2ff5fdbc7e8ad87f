-- Executions by namespace, lane, kind and state, newest first.
--
-- Each (route, state) pair is one range of a list index, so the page is merged from
-- a few index scans whatever the filter is.
with page as materialized (
    select x.partition_key, x.execution_id, x.created_at_ms
      from route
     cross join unnest(:states::text[]) as wanted (public_state)
     cross join lateral (
        (select l.partition_key, l.execution_id, l.created_at_ms
           from live l
          where l.route_id = route.route_id
            and l.public_state = wanted.public_state
            and l.created_at_ms > :created_after_ms::bigint
            and l.created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
            and (l.created_at_ms < :before_ms::bigint
                 or (l.execution_id, l.partition_key) < (:before_id::uuid, :before_partition::int))
          order by l.created_at_ms desc, l.execution_id desc, l.partition_key desc
          limit :limit::bigint)
        union all
        (select n.partition_key, n.execution_id, n.created_at_ms
           from ending n
          where n.route_id = route.route_id
            and n.public_state = wanted.public_state
            and n.created_at_ms > :created_after_ms::bigint
            and n.created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
            and (n.created_at_ms < :before_ms::bigint
                 or (n.execution_id, n.partition_key) < (:before_id::uuid, :before_partition::int))
          order by n.created_at_ms desc, n.execution_id desc, n.partition_key desc
          limit :limit::bigint)
     ) x
     where (:namespace::text is null or route.namespace = :namespace)
       and (:lane_id::text is null or route.lane_id = :lane_id)
       and (:execution_kind::text is null or route.execution_kind = :execution_kind
            or substr(route.execution_kind, 1, length(:versions_of::text)) = :versions_of)
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

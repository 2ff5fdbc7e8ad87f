-- Executions of one namespace, newest first.
--
-- Two selects: the list index of namespaces leaves out what runs, which is found by its route.
select e.*
  from (
    (select *
       from execution
      where namespace = :namespace
        and public_state <> 'active'
        and public_state = any(:states::text[])
        and (:lane_id::text is null or lane_id = :lane_id)
        and (:execution_kind::text is null or execution_kind = :execution_kind
             or substr(execution_kind, 1, length(:versions_of::text)) = :versions_of)
        and created_at_ms > :created_after_ms::bigint
        and created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
        and (created_at_ms < :before_ms::bigint
             or (execution_id, partition_key) < (:before_id::uuid, :before_partition::int))
      order by created_at_ms desc, execution_id desc, partition_key desc
      limit :limit::bigint)
    union all
    (select x.*
       from route
      cross join lateral (
         select *
           from execution
          where execution.route_id = route.route_id
            and public_state = 'active'
            and namespace = :namespace
            and created_at_ms > :created_after_ms::bigint
            and created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
            and (created_at_ms < :before_ms::bigint
                 or (execution_id, partition_key) < (:before_id::uuid, :before_partition::int))
          order by created_at_ms desc, execution_id desc, partition_key desc
          limit :limit::bigint
      ) as x
      where 'active' = any(:states::text[])
        and (:lane_id::text is null or route.lane_id = :lane_id)
        and (:execution_kind::text is null or route.execution_kind = :execution_kind
             or substr(route.execution_kind, 1, length(:versions_of::text)) = :versions_of))
  ) as e
 order by e.created_at_ms desc, e.execution_id desc, e.partition_key desc
 limit :limit::bigint;

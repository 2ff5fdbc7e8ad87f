-- Executions of some kinds that changed code stopped before a time, longest ago first.
select l.partition_key, l.execution_id
  from route
 cross join lateral (
    select *
      from live
     where live.route_id = route.route_id
       and live.blocking_reason = 'waiting_for_code'
       and coalesce(live.last_transition_at_ms, live.created_at_ms) <= :blocked_before_ms
     order by coalesce(live.last_transition_at_ms, live.created_at_ms)
     limit :limit
       for update skip locked
 ) as l
 where route.execution_kind = any(:kinds::text[])
   and (:namespace::text is null or route.namespace = :namespace)
 order by coalesce(l.last_transition_at_ms, l.created_at_ms)
 limit :limit;

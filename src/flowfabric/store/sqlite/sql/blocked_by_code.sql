-- Executions of some kinds that changed code stopped before a time, longest ago first.
select l.partition_key, l.execution_id
  from json_each(:kinds) as kind
 cross join route
    on route.execution_kind = kind.value
   and (:namespace is null or route.namespace = :namespace)
 cross join live as l
    on l.route_id = route.route_id
   and l.blocking_reason = 'waiting_for_code'
   and l.last_transition_at_ms <= :blocked_before_ms
 order by l.last_transition_at_ms
 limit :limit;

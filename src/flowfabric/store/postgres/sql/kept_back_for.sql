-- Executions kept back because no worker could run them, which a worker that serves this can.
select e.partition_key, e.execution_id
  from route
  join live e on e.route_id = route.route_id
 where route.lane_id = any(:lanes::text[])
   and (:kinds::text[] is null or route.execution_kind = any(:kinds::text[]))
   and (:namespace::text is null or route.namespace = :namespace)
   and route.required_capabilities <@ :capabilities::text[]
   and e.public_state = 'waiting'
   and not (e.ready and e.public_state = 'waiting')
   and e.blocking_reason = 'waiting_for_capable_worker'
 limit :limit::bigint;

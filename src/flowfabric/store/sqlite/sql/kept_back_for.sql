-- Executions kept back because no worker could run them, which a worker that serves this can.
select e.partition_key, e.execution_id
  from json_each(:lanes) as served
 cross join route on route.lane_id = served.value
 cross join live as e
    on e.route_id = route.route_id
   and e.public_state = 'waiting'
   and not (e.ready and e.public_state = 'waiting')
   and e.blocking_reason = 'waiting_for_capable_worker'
 where (:kinds is null or route.execution_kind in (select value from json_each(:kinds)))
   and (:namespace is null or route.namespace = :namespace)
   and not exists (
        select 1 from json_each(route.required_capabilities) as need
         where need.value not in (select value from json_each(:capabilities)))
 limit :limit;

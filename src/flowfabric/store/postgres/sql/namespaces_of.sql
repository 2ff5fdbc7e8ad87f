-- The namespaces of the given executions; those that do not exist are left out.
select e.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
 cross join lateral (
    select execution.partition_key, execution.execution_id, route.namespace
      from execution
      join route on route.route_id = execution.route_id
     where execution.partition_key = w.partition_key
       and execution.execution_id = w.execution_id
     limit 1
 ) e;

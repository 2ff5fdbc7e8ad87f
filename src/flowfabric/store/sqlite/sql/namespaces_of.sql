-- The namespaces of the given executions; those that do not exist are left out.
select e.partition_key, e.execution_id, r.namespace
  from json_each(:rows) as w
 cross join execution as e
    on e.partition_key = w.value ->> 'partition_keys'
   and e.execution_id = w.value ->> 'execution_ids'
 cross join route as r on r.route_id = e.route_id;

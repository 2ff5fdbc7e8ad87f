-- What upstreams have passed to the given executions.
select i.*
  from json_each(:rows) as w
 cross join execution_input as i
    on i.partition_key = w.value ->> 'partition_keys'
   and i.execution_id = w.value ->> 'execution_ids'
 order by i.partition_key, i.execution_id, i.resolved_at_ms, i.edge_id;

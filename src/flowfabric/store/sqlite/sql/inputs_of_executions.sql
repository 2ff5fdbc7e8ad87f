-- What upstreams have passed to the given executions.
select i.*
  from json_each(:execution_ids) as w
 cross join json_each(:partition_keys) as p on p.key = w.key
 cross join execution_input as i on i.partition_key = p.value and i.execution_id = w.value
 order by i.partition_key, i.execution_id, i.resolved_at_ms, i.edge_id;

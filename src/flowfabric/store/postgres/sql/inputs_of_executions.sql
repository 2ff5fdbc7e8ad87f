-- What upstreams have passed to the given executions.
select i.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join execution_input i on i.partition_key = w.partition_key and i.execution_id = w.execution_id
 order by i.partition_key, i.execution_id, i.resolved_at_ms, i.edge_id;

-- Applied edges out of the given executions that have not resolved yet.
select edge.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  join edge on edge.partition_key = w.partition_key and edge.upstream_id = w.execution_id
 where edge.edge_state = 'applied'
   and edge.dep_state = 'unsatisfied'
 order by edge.partition_key, edge.upstream_id, edge.downstream_id
 limit :limit::bigint
   for update of edge;

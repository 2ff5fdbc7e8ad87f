-- Applied edges out of the given executions that have not resolved yet.
select edge.*
  from json_each(:execution_ids) as w
 cross join json_each(:partition_keys) as p on p.key = w.key
 cross join edge on edge.partition_key = p.value and edge.upstream_id = w.value
 where edge.edge_state = 'applied'
   and edge.dep_state = 'unsatisfied'
 order by edge.partition_key, edge.upstream_id, edge.downstream_id
 limit :limit;

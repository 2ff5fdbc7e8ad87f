-- Applied edges out of the given executions that have not resolved yet, and for which the
-- end of the execution's present life counts.
select edge.*
  from unnest(:partition_keys::int[], :execution_ids::uuid[], :replay_counts::int[])
    as w (partition_key, execution_id, replay_count)
  join edge on edge.partition_key = w.partition_key and edge.upstream_id = w.execution_id
 where edge.edge_state = 'applied'
   and edge.dep_state = 'unsatisfied'
   and edge.counts_from_replay <= w.replay_count
 order by edge.partition_key, edge.upstream_id, edge.downstream_id
 limit :limit::bigint
   for update of edge;

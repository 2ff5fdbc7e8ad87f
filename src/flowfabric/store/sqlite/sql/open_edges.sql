-- Applied edges out of the given executions that have not resolved yet, and for which the
-- end of the execution's present life counts.
select edge.*
  from json_each(:rows)
 cross join edge on edge.partition_key = value ->> 'partition_keys'
                and edge.upstream_id = value ->> 'execution_ids'
 where edge.edge_state = 'applied'
   and edge.dep_state = 'unsatisfied'
   and edge.counts_from_replay <= value ->> 'replay_counts'
 order by edge.partition_key, edge.upstream_id, edge.downstream_id
 limit :limit;

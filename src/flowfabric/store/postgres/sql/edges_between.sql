-- The edges that exist between the given pairs.
select edge.*
  from unnest(:upstream_ids::uuid[], :downstream_ids::uuid[]) as w (upstream_id, downstream_id)
  join edge on edge.partition_key = :partition_key::int
           and edge.upstream_id = w.upstream_id
           and edge.downstream_id = w.downstream_id;

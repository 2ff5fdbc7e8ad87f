-- The edges that exist between the given pairs.
select e.*
  from unnest(:upstream_ids::uuid[], :downstream_ids::uuid[]) as w (upstream_id, downstream_id)
 cross join lateral (
    select edge.*
      from edge
     where edge.partition_key = :partition_key::int
       and edge.upstream_id = w.upstream_id
       and edge.downstream_id = w.downstream_id
     limit 1
 ) e;

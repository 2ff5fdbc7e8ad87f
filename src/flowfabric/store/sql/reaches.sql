-- Whether one execution can be reached from another along edges.
with recursive walk (node) as (
    select downstream_id
      from edge
     where partition_key = :partition_key
       and upstream_id = :start
    union
    select edge.downstream_id
      from walk
      join edge on edge.partition_key = :partition_key and edge.upstream_id = walk.node
)
select 1 as found from walk where node = :target limit 1;

-- Every edge that can be reached from the given executions.
with recursive walk (upstream_id, downstream_id) as (
    select upstream_id, downstream_id
      from edge
     where partition_key = :partition_key
       and upstream_id in (select value from json_each(:starts))
    union
    select edge.upstream_id, edge.downstream_id
      from walk
      join edge on edge.partition_key = :partition_key
               and edge.upstream_id = walk.downstream_id
)
select upstream_id, downstream_id from walk;

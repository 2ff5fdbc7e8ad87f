-- Every edge that can be reached from the given executions.
with recursive walk (upstream_id, downstream_id) as (
    select upstream_id, downstream_id
      from edge
     where partition_key = :partition_key::int
       and upstream_id = any(:starts::uuid[])
    union
    select next.upstream_id, next.downstream_id
      from walk
     cross join lateral (
        select edge.upstream_id, edge.downstream_id
          from edge
         where edge.partition_key = :partition_key::int
           and edge.upstream_id = walk.downstream_id
        offset 0
     ) next
)
select upstream_id, downstream_id from walk;

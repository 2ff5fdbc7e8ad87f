-- Every edge into one execution.
select *
  from edge
 where partition_key = :partition_key::int
   and downstream_id = :downstream_id::uuid
 order by edge_id
   for update;

-- Every edge into one execution.
select *
  from edge
 where partition_key = :partition_key
   and downstream_id = :downstream_id
 order by edge_id
   for update;

-- Edges into one member of a flow by ascending id.
select *
  from edge
 where partition_key = :partition_key
   and downstream_id = :execution_id
   and flow_id = :flow_id
   and edge_id >= :start
 order by edge_id
 limit :limit;

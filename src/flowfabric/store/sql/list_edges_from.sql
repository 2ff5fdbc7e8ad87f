-- Edges out of one member of a flow by ascending id.
select *
  from edge
 where partition_key = :partition_key
   and upstream_id = :execution_id
   and flow_id = :flow_id
   and edge_id >= :start
 order by edge_id
 limit :limit;

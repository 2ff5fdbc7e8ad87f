-- Edges of a flow by ascending id.
select *
  from edge
 where partition_key = :partition_key
   and flow_id = :flow_id
   and edge_id >= :start
 order by edge_id
 limit :limit;

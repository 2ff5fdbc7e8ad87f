-- Joins of a flow by ascending downstream id.
select *
  from edge_group
 where flow_id = :flow_id
   and downstream_id >= :start
 order by downstream_id
 limit :limit;

-- Every tag of a flow.
select *
  from flow_tag
 where partition_key = :partition_key
   and flow_id = :flow_id
 order by tag_key;

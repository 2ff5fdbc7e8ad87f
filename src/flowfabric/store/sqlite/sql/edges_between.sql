-- The edges that exist between the given pairs.
select edge.*
  from json_each(:upstream_ids) as u
 cross join json_each(:downstream_ids) as d on d.key = u.key
 cross join edge on edge.partition_key = :partition_key
                and edge.upstream_id = u.value
                and edge.downstream_id = d.value;

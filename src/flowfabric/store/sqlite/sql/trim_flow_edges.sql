-- Delete edges of flows.
delete from edge
 where (partition_key, flow_id, edge_id) in (
    select edge.partition_key, edge.flow_id, edge.edge_id
      from json_each(:flow_ids) as w
     cross join json_each(:partition_keys) as p on p.key = w.key
     cross join edge on edge.partition_key = p.value and edge.flow_id = w.value
     limit :limit);
-- next
select changes() as trimmed;

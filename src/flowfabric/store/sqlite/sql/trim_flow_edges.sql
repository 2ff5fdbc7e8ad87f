-- Delete edges of flows.
delete from edge
 where (partition_key, flow_id, edge_id) in (
    select edge.partition_key, edge.flow_id, edge.edge_id
      from json_each(:rows)
     cross join edge on edge.partition_key = value ->> 'partition_keys'
                    and edge.flow_id = value ->> 'flow_ids'
     limit :limit);
-- next
select changes() as trimmed;

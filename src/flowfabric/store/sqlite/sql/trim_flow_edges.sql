-- Delete edges of flows.
delete from edge
 where (flow_id, edge_id, partition_key) in (
    select edge.flow_id, edge.edge_id, edge.partition_key
      from json_each(:rows)
     cross join edge on edge.partition_key = value ->> 'partition_keys'
                    and edge.flow_id = value ->> 'flow_ids'
     limit :limit);
-- next
select changes() as trimmed;

-- Delete edges of flows.
with doomed as materialized (
    select edge.partition_key, edge.flow_id, edge.edge_id
      from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
      join edge on edge.partition_key = w.partition_key and edge.flow_id = w.flow_id
     limit :limit::bigint
), gone as (
    delete from edge using doomed d
     where edge.partition_key = d.partition_key
       and edge.flow_id = d.flow_id
       and edge.edge_id = d.edge_id
    returning 1
)
select count(*) as trimmed from gone;

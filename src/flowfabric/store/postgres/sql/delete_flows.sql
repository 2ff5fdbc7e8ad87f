-- Delete flows that have no members and edges left.
with doomed as (
    select * from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
), tags as (
    delete from flow_tag t using doomed d
     where t.partition_key = d.partition_key and t.flow_id = d.flow_id
), cancels as (
    delete from pending_cancel c using doomed d where c.flow_id = d.flow_id
), untold as (
    delete from completion_dispatch c using doomed d
     where c.partition_key = d.partition_key and c.flow_id = d.flow_id
)
delete from flow f using doomed d
 where f.partition_key = d.partition_key and f.flow_id = d.flow_id;

-- Whether any of the flows has a member left.
select 1 as found
  from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
  join flow_member e on e.flow_id = w.flow_id and e.partition_key = w.partition_key
 limit 1;

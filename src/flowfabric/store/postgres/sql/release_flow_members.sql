-- Let members of flows go with the executions that are past their keep time.
with doomed as materialized (
    select e.ctid as row_version
      from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
      join ending e on e.flow_id = w.flow_id and e.partition_key = w.partition_key
     where e.retain_until_ms is null
     order by e.partition_key, e.execution_id
     limit :limit::bigint
       for update of e
), released as (
    update ending e
       set retain_until_ms = :now_ms::bigint
      from doomed d
     -- The row is locked, so its version cannot change under us: no need to look it up again.
     where e.ctid = d.row_version
    returning 1
)
select count(*) as released from released;

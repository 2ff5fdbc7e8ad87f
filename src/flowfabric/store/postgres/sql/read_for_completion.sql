-- A flow's member that is about to end, and the open edges that its end resolves, with their joins
-- and downstreams: a row for itself, and one for each edge.
--
-- Everything is looked up one by one: as a plain join this may be planned as a walk over a table.
select f.*, f.version as flow,
       w.*, w.version as edge,
       g.*, g.version as edge_group,
       e.*, e.version as execution_now,
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from (
    select null::uuid as downstream_id
    union all
    select *
      from (
        select downstream_id
          from edge
         where edge.partition_key = :partition_key::int
           and edge.upstream_id = :execution_id::uuid
           and edge.edge_state = 'applied'
           and edge.dep_state = 'unsatisfied'
         order by edge.downstream_id
         limit :limit::bigint
      ) as open
  ) as t
 cross join lateral (
    select *
      from execution_now
     where execution_now.partition_key = :partition_key::int
       and execution_now.execution_id = coalesce(t.downstream_id, :execution_id::uuid)
     limit 1
 ) as e
  left join lateral (
    select *, xmin as version
      from flow
     where flow.partition_key = e.partition_key and flow.flow_id = e.flow_id
     limit 1
 ) as f on true
  left join lateral (
    select *, xmin as version
      from edge
     where edge.partition_key = e.partition_key
       and edge.upstream_id = :execution_id::uuid
       and edge.downstream_id = t.downstream_id
     limit 1
 ) as w on true
  left join lateral (
    select *, xmin as version
      from edge_group
     where edge_group.partition_key = e.partition_key
       and edge_group.downstream_id = t.downstream_id
     limit 1
 ) as g on true;

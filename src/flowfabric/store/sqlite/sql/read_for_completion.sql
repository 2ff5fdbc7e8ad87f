-- A flow's member that is about to end, and the open edges that its end resolves, with their joins
-- and downstreams: a row for itself, and one for each edge.
select f.*, f.flow_id as flow,
       w.*, w.edge_id as edge,
       g.*, g.flow_id as edge_group,
       e.*, e.execution_id as execution_now,
       :clock as now_ms
  from (
    select null as downstream_id
    union all
    select *
      from (
        select downstream_id
          from edge
         where partition_key = :partition_key
           and upstream_id = :execution_id
           and edge_state = 'applied'
           and dep_state = 'unsatisfied'
         order by downstream_id
         limit :limit)) as t
 cross join execution_now as e
    on e.partition_key = :partition_key
   and e.execution_id = coalesce(t.downstream_id, :execution_id)
  left join flow as f on f.partition_key = e.partition_key and f.flow_id = e.flow_id
  left join edge as w
    on w.partition_key = e.partition_key
   and w.upstream_id = :execution_id
   and w.downstream_id = t.downstream_id
  left join edge_group as g
    on g.partition_key = e.partition_key and g.downstream_id = t.downstream_id;

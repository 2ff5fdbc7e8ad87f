-- Endings of flow members that nobody has been told of, each with its flow and the open edges it
-- resolves, their joins and downstreams: a row for each edge, and one without when there is none.
--
-- An ending without edges finds its own execution in place of a downstream: the view would be
-- read as a whole if it might be missing.
select f.*, f.flow_id as flow,
       d.*, d.flow_id as completion_dispatch,
       u.partition_key, u.execution_id, u.replay_count as current_replay_count,
       u.cancellation_reason,
       case when w.data_passing_ref <> '' then u.result end as result,
       case when w.data_passing_ref <> '' then u.result_encoding end as result_encoding,
       u.execution_id as ended_upstream,
       w.*, w.edge_id as edge,
       g.*, g.flow_id as edge_group,
       e.*, case when w.edge_id is not null then e.execution_id end as execution_now,
       :clock as now_ms
  from (select *
          from completion_dispatch
         order by partition_key, flow_id, execution_id, replay_count
         limit :limit) as d
  left join flow as f on f.partition_key = d.partition_key and f.flow_id = d.flow_id
  left join execution as x on x.partition_key = d.partition_key and x.execution_id = d.execution_id
  left join ending as u on u.execution_rowid = x.execution_rowid
  left join edge as w
    on w.partition_key = d.partition_key
   and w.upstream_id = d.execution_id
   and w.edge_state = 'applied'
   and w.dep_state = 'unsatisfied'
   and w.counts_from_replay <= d.replay_count
  left join edge_group as g
    on g.partition_key = w.partition_key and g.downstream_id = w.downstream_id
 cross join execution_now as e
    on e.partition_key = d.partition_key
   and e.execution_id = coalesce(w.downstream_id, d.execution_id)
 limit :limit;

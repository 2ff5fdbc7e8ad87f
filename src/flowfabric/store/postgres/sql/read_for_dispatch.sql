-- Endings of flow members that nobody has been told of, each with its flow and the open edges it
-- resolves, their joins and downstreams: a row for each edge, and one without when there is none.
--
-- Everything is looked up one by one: as a plain join this may be planned as a walk over a table.
select f.*, f.version as flow,
       d.*, d.version as completion_dispatch,
       u.partition_key, u.execution_id, coalesce(u.replay_count, 0) as current_replay_count,
       u.cancellation_reason,
       case when w.data_passing_ref <> '' then u.result end as result,
       case when w.data_passing_ref <> '' then u.result_encoding end as result_encoding,
       u.execution_id::text as ended_upstream,
       w.*, w.version as edge,
       g.*, g.version as edge_group,
       e.*, e.version as execution_now,
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from (
    select *, xmin as version
      from completion_dispatch
     order by partition_key, flow_id, execution_id, replay_count
     limit :limit::bigint
  ) as d
  left join lateral (
    select *, xmin as version
      from flow
     where flow.partition_key = d.partition_key and flow.flow_id = d.flow_id
     limit 1
 ) as f on true
  left join lateral (
    select *
      from ending
     where ending.partition_key = d.partition_key and ending.execution_id = d.execution_id
     limit 1
 ) as u on true
  left join lateral (
    select *, xmin as version
      from edge
     where edge.partition_key = d.partition_key
       and edge.upstream_id = d.execution_id
       and edge.edge_state = 'applied'
       and edge.dep_state = 'unsatisfied'
       and edge.counts_from_replay <= d.replay_count
     order by edge.downstream_id
     limit :limit::bigint
 ) as w on true
  left join lateral (
    select *, xmin as version
      from edge_group
     where edge_group.partition_key = w.partition_key
       and edge_group.downstream_id = w.downstream_id
     limit 1
 ) as g on true
  left join lateral (
    select *
      from execution_now
     where execution_now.partition_key = w.partition_key
       and execution_now.execution_id = w.downstream_id
     limit 1
 ) as e on true
 order by d.partition_key, d.flow_id, d.execution_id, d.replay_count, w.downstream_id
 limit :limit::bigint;

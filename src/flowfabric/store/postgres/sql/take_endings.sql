-- Endings of the given flows' members, and what their executions look like now. The result
-- comes along only where an open edge passes it on.
--
-- Everything is looked up ending by ending. Joined freely, a queue that was long when it was
-- last analyzed is planned as a walk over all executions, or over all edges.
select d.*, d.execution_id::text as completion_dispatch,
       e.partition_key, e.execution_id, e.replay_count as current_replay_count,
       e.cancellation_reason,
       case when p.passes then e.result end as result,
       case when p.passes then e.result_encoding end as result_encoding,
       e.execution_id::text as ended_upstream
  from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
 cross join lateral (
    select *
      from completion_dispatch
     where completion_dispatch.partition_key = w.partition_key
       and completion_dispatch.flow_id = w.flow_id
     order by execution_id, replay_count
     limit :limit::bigint
 ) d
 cross join lateral (
    select *
      from execution_now
     where execution_now.partition_key = d.partition_key
       and execution_now.execution_id = d.execution_id
     limit 1
 ) e
  left join lateral (
    select true as passes
      from edge
     where edge.partition_key = d.partition_key
       and edge.upstream_id = d.execution_id
       and edge.dep_state = 'unsatisfied'
       and edge.data_passing_ref <> ''
     limit 1
 ) p on true
 order by d.partition_key, d.execution_id, d.replay_count
 limit :limit::bigint;

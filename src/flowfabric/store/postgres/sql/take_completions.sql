-- Endings of the given flows' members, and what their executions look like now. The result
-- comes along only where an open edge passes it on.
select d.partition_key, d.flow_id, d.execution_id, d.replay_count, d.outcome, d.enqueued_at_ms,
       e.replay_count as current_replay_count, e.cancellation_reason,
       case when p.passes then e.result end as result,
       case when p.passes then e.result_encoding end as result_encoding
  from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
  join completion_dispatch d on d.partition_key = w.partition_key and d.flow_id = w.flow_id
  join execution e on e.partition_key = d.partition_key and e.execution_id = d.execution_id
 cross join lateral (
    select exists (
        select 1
          from edge
         where edge.partition_key = d.partition_key
           and edge.upstream_id = d.execution_id
           and edge.dep_state = 'unsatisfied'
           and edge.data_passing_ref <> ''
    ) as passes
 ) p
 order by d.partition_key, d.execution_id, d.replay_count
 limit :limit::bigint;

-- Endings of the given flows' members, and what their executions look like now. The result
-- comes along only where an open edge passes it on.
select d.partition_key, d.flow_id, d.execution_id, d.replay_count, d.outcome, d.enqueued_at_ms,
       d.execution_id as completion_dispatch,
       e.partition_key, e.execution_id, e.replay_count as current_replay_count,
       e.cancellation_reason,
       case when d.passes then e.result end as result,
       case when d.passes then e.result_encoding end as result_encoding,
       e.execution_id as ended_upstream
  from (select c.*,
               exists (
                    select 1
                      from edge
                     where edge.partition_key = c.partition_key
                       and edge.upstream_id = c.execution_id
                       and edge.dep_state = 'unsatisfied'
                       and edge.data_passing_ref <> '') as passes
          from json_each(:rows)
         cross join completion_dispatch as c
            on c.partition_key = value ->> 'partition_keys'
           and c.flow_id = value ->> 'flow_ids'
         order by c.partition_key, c.execution_id, c.replay_count
         limit :limit) as d
 cross join execution_now as e
    on e.partition_key = d.partition_key and e.execution_id = d.execution_id
 order by d.partition_key, d.execution_id, d.replay_count;

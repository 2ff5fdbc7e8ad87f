-- Executions another one still waits for, and from which of their lives on.
select e.execution_id, e.public_state, e.terminal_outcome, e.replay_count, g.counts_from_replay,
       e.execution_kind, e.lifecycle_phase, e.blocking_reason,
       (select tag_value
          from execution_tag t
         where t.partition_key = e.partition_key
           and t.execution_id = e.execution_id
           and t.tag_key = 'flow.node') as node_name
  from (select *
          from edge
         where partition_key = :partition_key
           and downstream_id = :downstream_id
           and dep_state = 'unsatisfied'
         order by edge_id
         limit :limit) g
  join execution_now e on e.partition_key = g.partition_key and e.execution_id = g.upstream_id
 order by g.edge_id;

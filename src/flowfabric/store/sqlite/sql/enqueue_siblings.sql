-- Have the upstreams cancelled that fired groups no longer need: those whose edge is open.
insert or ignore into pending_cancel (
    partition_key, execution_id, flow_id, downstream_id, reason, only_waiting, enqueued_at_ms,
    due_at_ms)
select edge.partition_key, edge.upstream_id, edge.flow_id, edge.downstream_id,
       value ->> 'reasons', 0, :now_ms, :now_ms
  from json_each(:rows)
 cross join edge on edge.partition_key = value ->> 'partition_keys'
                and edge.downstream_id = value ->> 'downstream_ids'
 where edge.dep_state = 'unsatisfied';

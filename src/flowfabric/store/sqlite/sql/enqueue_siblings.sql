-- Have the upstreams cancelled that fired groups no longer need: those whose edge is open.
insert or ignore into pending_cancel (
    partition_key, execution_id, flow_id, downstream_id, reason, only_waiting, enqueued_at_ms)
select edge.partition_key, edge.upstream_id, edge.flow_id, edge.downstream_id, r.value, 0, :now_ms
  from json_each(:downstream_ids) as w
 cross join json_each(:partition_keys) as p on p.key = w.key
 cross join json_each(:reasons) as r on r.key = w.key
 cross join edge on edge.partition_key = p.value and edge.downstream_id = w.value
 where edge.dep_state = 'unsatisfied';

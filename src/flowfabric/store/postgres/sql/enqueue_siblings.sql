-- Have the upstreams cancelled that fired groups no longer need: those whose edge is open.
insert into pending_cancel (
    partition_key, execution_id, flow_id, downstream_id, reason, only_waiting, enqueued_at_ms,
    due_at_ms)
select distinct on (edge.partition_key, edge.upstream_id)
       edge.partition_key, edge.upstream_id, edge.flow_id, edge.downstream_id, w.reason, false,
       :now_ms::bigint, :now_ms::bigint
  from unnest(:partition_keys::int[], :downstream_ids::uuid[], :reasons::text[])
    as w (partition_key, downstream_id, reason)
  join edge on edge.partition_key = w.partition_key and edge.downstream_id = w.downstream_id
 where edge.dep_state = 'unsatisfied'
 order by edge.partition_key, edge.upstream_id
    on conflict do nothing;

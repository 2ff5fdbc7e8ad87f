-- Queue a flow's members for cancellation; those already queued stay as they are.
insert into pending_cancel (
    partition_key, execution_id, flow_id, reason, only_waiting, enqueued_at_ms, due_at_ms)
select partition_key, execution_id, flow_id, :reason::text, :only_waiting::boolean,
       :now_ms::bigint, :now_ms::bigint
  from execution
 where flow_id = :flow_id::uuid
   and lifecycle_phase <> 'terminal'
   and (not :only_waiting::boolean
        or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
 order by partition_key, execution_id
    on conflict do nothing;

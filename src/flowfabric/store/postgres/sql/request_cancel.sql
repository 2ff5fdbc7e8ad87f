-- Mark a flow's members as about to be cancelled, so that no claim takes them any more, and
-- queue each for it; those already queued stay as they are.
--
-- Members that are queued are locked, and a transaction that cancels one locks its row of the
-- queue first. That cannot wait for us: a conflict with a row of the queue is ignored, not awaited.
with chosen as materialized (
    select partition_key, execution_id, flow_id
      from live
     where flow_id = :flow_id::uuid
       and (not :only_waiting::boolean
            or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
     order by partition_key, execution_id
       for update
), queued as (
    insert into pending_cancel (
        partition_key, execution_id, flow_id, reason, only_waiting, enqueued_at_ms, due_at_ms)
    select partition_key, execution_id, flow_id, :reason::text, :only_waiting::boolean,
           :now_ms::bigint, :now_ms::bigint
      from chosen
        on conflict do nothing
)
update live e
   set cancel_requested = true,
       ready = false,
       last_mutation_at_ms = :now_ms::bigint
  from chosen c
 where e.partition_key = c.partition_key
   and e.execution_id = c.execution_id
returning e.partition_key, e.execution_id;

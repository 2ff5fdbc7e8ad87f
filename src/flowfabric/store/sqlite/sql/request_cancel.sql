-- Mark a flow's members as about to be cancelled, so that no claim takes them any more, and
-- queue each for it; those already queued stay as they are.
insert or ignore into pending_cancel (
    partition_key, execution_id, flow_id, reason, only_waiting, enqueued_at_ms, due_at_ms)
select partition_key, execution_id, flow_id, :reason, :only_waiting, :now_ms, :now_ms
  from live
 where flow_id = :flow_id
   and (not :only_waiting
        or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'));
-- next
update live
   set cancel_requested = 1,
       ready = 0,
       last_mutation_at_ms = :now_ms
 where flow_id = :flow_id
   and (not :only_waiting
        or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
returning partition_key, execution_id;

-- Mark a flow's members as about to be cancelled, so that nobody claims them any more.
update execution
   set cancel_requested = 1,
       ready = 0,
       last_mutation_at_ms = :now_ms
 where flow_id = :flow_id
   and lifecycle_phase <> 'terminal'
   and (not :only_waiting
        or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
returning execution_id;

-- Mark a flow's members as about to be cancelled, so that nobody claims them any more.
with chosen as materialized (
    select partition_key, execution_id
      from execution
     where flow_id = :flow_id::uuid
       and lifecycle_phase <> 'terminal'
       and (not :only_waiting::boolean
            or (lifecycle_phase in ('submitted', 'runnable') and ownership_state = 'unowned'))
     order by partition_key, execution_id
       for update
)
update execution e
   set cancel_requested = true,
       ready = false,
       last_mutation_at_ms = :now_ms::bigint
  from chosen c
 where e.partition_key = c.partition_key
   and e.execution_id = c.execution_id
returning e.execution_id;

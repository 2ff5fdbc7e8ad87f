-- Have members of a closed flow cancelled whose quorum waits for edges that can no longer be added.
insert into pending_cancel (
    partition_key, execution_id, flow_id, reason, only_waiting, enqueued_at_ms, due_at_ms)
select partition_key, downstream_id, flow_id, cast(:reason as text), false,
       cast(:now_ms as bigint), cast(:now_ms as bigint)
  from edge_group
 where flow_id = :flow_id
   and group_state = 'pending'
   and staged > 0
   and k > staged
    on conflict do nothing
returning execution_id;

-- Try members again at once whose cancellation has failed.
update pending_cancel
   set due_at_ms = enqueued_at_ms
 where flow_id = :flow_id
   and due_at_ms <> enqueued_at_ms;

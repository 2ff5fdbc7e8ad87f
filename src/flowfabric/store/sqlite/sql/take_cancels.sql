-- Members due to be cancelled; of one flow, or of any.
select *
  from pending_cancel
 where (:flow_id is null or flow_id = :flow_id)
   and due_at_ms <= :now_ms
 order by partition_key, execution_id
 limit :limit;

-- Members due to be cancelled that no other transaction holds; of one flow, or of any.
select *
  from pending_cancel
 where (flow_id = :flow_id or :flow_id is null)
   and due_at_ms <= :now_ms
 order by partition_key, execution_id
 limit :limit
   for update skip locked;

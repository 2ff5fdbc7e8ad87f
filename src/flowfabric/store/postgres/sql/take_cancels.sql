-- Members due to be cancelled that no other transaction holds; of one flow, or of any.
select *
  from pending_cancel
 where (:flow_id::uuid is null or flow_id = :flow_id::uuid)
   and due_at_ms <= :now_ms::bigint
 order by partition_key, execution_id
 limit :limit::bigint
   for update skip locked;

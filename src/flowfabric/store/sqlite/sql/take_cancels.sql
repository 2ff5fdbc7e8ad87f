-- Members to cancel; of one flow, or of any.
select *
  from pending_cancel
 where (:flow_id is null or flow_id = :flow_id)
 order by partition_key, execution_id
 limit :limit;

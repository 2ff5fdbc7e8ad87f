-- Members of a flow that are still to be cancelled, those never tried first.
select partition_key, execution_id, attempts
  from pending_cancel
 where flow_id = :flow_id
 order by attempts, execution_id
 limit :limit;

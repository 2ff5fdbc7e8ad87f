-- Whether dependents of anything wait to be told.
select 1 as found
  from completion_dispatch
 order by partition_key, flow_id, execution_id, replay_count
 limit 1;

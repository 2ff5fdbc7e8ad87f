-- What the longest suspended executions wait for; the limit counts executions, of which one
-- without open waitpoints has a row of its own.
select s.partition_key, s.execution_id, e.execution_kind, e.lane_id, w.waitpoint_id,
       w.waitpoint_key, w.required_signal_names, s.created_at_ms as suspended_at_ms,
       s.timeout_at_ms
  from (select partition_key, execution_id, suspension_id, created_at_ms, timeout_at_ms
          from suspension
         where closed_at_ms is null
           and (created_at_ms, execution_id) > (:after_ms, :after_id)
         order by created_at_ms, execution_id
         limit :limit) as s
  join execution e on e.partition_key = s.partition_key and e.execution_id = s.execution_id
  left join waitpoint w
    on w.partition_key = s.partition_key
   and w.execution_id = s.execution_id
   and w.suspension_id = s.suspension_id
   and w.state <> 'closed'
 order by s.created_at_ms, s.execution_id, w.ordinal;

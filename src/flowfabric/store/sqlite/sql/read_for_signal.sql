-- An execution with its open suspension and its open waitpoints, as signals find it: a row for
-- each waitpoint, and one without when there is none.
select e.*, e.execution_id as execution_now,
       s.*, s.suspension_id as suspension,
       w.*, w.waitpoint_id as waitpoint,
       :clock as now_ms
  from execution_now as e
  left join suspension as s
    on s.partition_key = e.partition_key
   and s.execution_id = e.execution_id
   and s.suspension_id = e.current_suspension_id
  left join waitpoint as w
    on w.partition_key = e.partition_key
   and w.execution_id = e.execution_id
   and w.state <> 'closed'
 where e.partition_key = :partition_key
   and e.execution_id = :execution_id
 order by w.waitpoint_id;

-- An execution with its open suspension and its open waitpoints, as signals find it: a row for
-- each waitpoint, and one without when there is none.
select e.*, e.version as execution_now,
       s.*, s.xmin as suspension,
       w.*, w.xmin as waitpoint,
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from execution_now e
  left join suspension s
    on s.partition_key = e.partition_key
   and s.execution_id = e.execution_id
   and s.suspension_id = e.current_suspension_id
  left join waitpoint w
    on w.partition_key = e.partition_key
   and w.execution_id = e.execution_id
   and w.state <> 'closed'
 where e.partition_key = :partition_key
   and e.execution_id = :execution_id
 order by w.waitpoint_id;

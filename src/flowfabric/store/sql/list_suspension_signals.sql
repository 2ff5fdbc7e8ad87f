-- Signals of one suspension, in order: those it used, and with `every` also what its waitpoints
-- got and no wait has used.
select g.*
  from signal g
 where g.partition_key = :partition_key
   and g.execution_id = :execution_id
   and g.suspension_id = :suspension_id
union all
select g.*
  from waitpoint w
  join signal g
    on g.partition_key = w.partition_key
   and g.execution_id = w.execution_id
   and g.waitpoint_id = w.waitpoint_id
   and g.suspension_id is null
 where cast(:every as boolean)
   and w.partition_key = :partition_key
   and w.execution_id = :execution_id
   and w.suspension_id = :suspension_id
 order by sequence
 limit :limit;

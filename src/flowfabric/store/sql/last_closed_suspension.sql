-- The pause of an execution that ended last.
select *
  from suspension
 where partition_key = :partition_key
   and execution_id = :execution_id
   and closed_at_ms is not null
 order by sequence desc
 limit 1;

-- Signals of one suspension, in order: those that brought it forward, or every one.
select *
  from signal
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id = :suspension_id
   and (satisfier or cast(:every as boolean))
 order by sequence
 limit :limit;

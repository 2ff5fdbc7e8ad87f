-- The waitpoints of one suspension, in the order they were bound.
select *
  from waitpoint
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id = :suspension_id
 order by ordinal;

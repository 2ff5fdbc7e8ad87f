-- One execution, which nobody may change before this transaction ends.
select *
  from execution
 where partition_key = :partition_key
   and execution_id = :execution_id
   for share;

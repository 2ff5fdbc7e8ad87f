-- One execution, which nobody may change before this transaction ends.
--
-- Writing takes the lock that keeps all other writers out.
update execution
   set lease_epoch = lease_epoch
 where partition_key = :partition_key
   and execution_id = :execution_id;
-- next
select *
  from execution
 where partition_key = :partition_key
   and execution_id = :execution_id;

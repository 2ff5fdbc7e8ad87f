-- A few of those that an execution, by its full id, waits for or has waited for.
select *
  from waiter
 where waiting = :waiting
 order by partition_key, execution_id
 limit :limit;

-- A page of all executions that wait for others, or have waited, by their full ids.
select distinct waiting
  from waiter
 where waiting > :after
 order by waiting
 limit :limit;

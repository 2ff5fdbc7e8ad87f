-- One page of waiters: the waits whose execution was deleted, and the last waiter of the page.
with page as materialized (
    select p.waiting, row_number() over (order by p.waiting) as place
      from (select distinct waiting
              from waiter
             where waiting > :after
             order by waiting
             limit :limit) p
)
select p.place, p.waiting, w.partition_key, w.execution_id
  from page p
  left join waiter w
    on w.waiting = p.waiting
   and not exists (
        select 1 from execution e
         where e.partition_key = w.partition_key and e.execution_id = w.execution_id)
 where w.waiting is not null
    or p.place = (select max(place) from page)
 order by p.place, w.partition_key, w.execution_id;

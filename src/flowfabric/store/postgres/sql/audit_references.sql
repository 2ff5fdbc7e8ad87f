-- Rows that name an execution which is gone; some of each kind.
select * from (
    select 'idempotency_guard' as belongings, g.execution as gone
      from idempotency_guard g
     where not exists (
            select 1 from execution e
             where e.partition_key = cast(substr(g.execution, 5, strpos(g.execution, '}') - 5) as smallint)
               and e.execution_id = cast(right(g.execution, 36) as uuid))
     limit :limit) as guard_strays
union all
select * from (
    select 'waiter' as belongings, w.waiting as gone
      from waiter w
     where not exists (
            select 1 from execution e
             where e.partition_key = cast(substr(w.waiting, 5, strpos(w.waiting, '}') - 5) as smallint)
               and e.execution_id = cast(right(w.waiting, 36) as uuid))
     limit :limit) as waiter_strays;

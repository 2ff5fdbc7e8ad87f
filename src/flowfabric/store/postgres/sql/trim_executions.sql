-- Delete ended executions past their keep time, with all that belongs to them.
--
-- One that is still needed stays: until what waited for it has been woken, as long as
-- anybody who waited for it has not ended, and as long as its parent has not succeeded: one that
-- failed may be replayed. It is looked at again after as long as it has been kept already, within
-- limits, so that those that stay cost little.
with due as materialized (
    select n.*, e.*
      from (select ctid as ending_row, partition_key, execution_id, awaited, completed_at_ms
              from ending
             where retain_until_ms is not null
               and retain_until_ms <= :before_ms::bigint
-- within ending
             order by retain_until_ms
             limit :limit::bigint
               for update skip locked) as n
     cross join lateral (
        select x.ctid as asked_row, x.parent_execution_id, x.idempotency_key,
               case when x.idempotency_key is not null then
                   (select r.namespace from route r where r.route_id = x.route_id) end as namespace
          from execution x
         where x.partition_key = n.partition_key and x.execution_id = n.execution_id
         limit 1) as e
), needed as materialized (
    -- `offset 0` has each row looked up by key: otherwise all executions may be hashed first.
    select d.partition_key, d.execution_id, d.ending_row, d.completed_at_ms
      from due d
     where d.awaited
        or exists (
            select from live p
             where p.partition_key = split_part(substr(d.parent_execution_id, 5), '}', 1)::int
               and p.execution_id = right(d.parent_execution_id, 36)::uuid
            offset 0)
        or exists (
            select from ending p
             where p.partition_key = split_part(substr(d.parent_execution_id, 5), '}', 1)::int
               and p.execution_id = right(d.parent_execution_id, 36)::uuid
               and p.terminal_outcome <> 'success'
            offset 0)
        or exists (
            select from waiter w
              join live p
                on p.partition_key = split_part(substr(w.waiting, 5), '}', 1)::int
               and p.execution_id = right(w.waiting, 36)::uuid
             where w.partition_key = d.partition_key
               and w.execution_id = d.execution_id
            offset 0)
), held as (
    -- The rows are locked, so their versions cannot change under us: no need to look them up again.
    update ending e
       set retain_until_ms = :before_ms::bigint + least(
               greatest(:before_ms::bigint - n.completed_at_ms, :held_ms_min::bigint),
               :held_ms_max::bigint)
      from needed n
     where e.ctid = n.ending_row
), doomed as materialized (
    select d.*
      from due d
     where not exists (
        select from needed n
         where n.partition_key = d.partition_key and n.execution_id = d.execution_id)
), attempts as (
    delete from attempt a using doomed d
     where a.partition_key = d.partition_key and a.execution_id = d.execution_id
), tags as (
    delete from execution_tag t using doomed d
     where t.partition_key = d.partition_key and t.execution_id = d.execution_id
), grants as (
    delete from claim_grant g using doomed d
     where g.partition_key = d.partition_key and g.execution_id = d.execution_id
), streams as (
    -- There may be many frames: they go by and by, and the summaries with them.
    update stream s set expires_at_ms = 0, forgotten = true from doomed d
     where s.partition_key = d.partition_key and s.execution_id = d.execution_id
), steps as (
    delete from step s using doomed d
     where s.partition_key = d.partition_key and s.execution_id = d.execution_id
), waiters as (
    delete from waiter w using doomed d
     where w.partition_key = d.partition_key and w.execution_id = d.execution_id
), waits as (
    delete from waiter w using doomed d
     where w.waiting = '{fp:' || d.partition_key || '}:' || d.execution_id
), suspensions as (
    delete from suspension x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), waitpoints as (
    delete from waitpoint x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), signals as (
    delete from signal x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), signal_dedups as (
    delete from signal_dedup x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), suspend_dedups as (
    delete from suspend_dedup x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), inputs as (
    delete from execution_input x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), joins as (
    delete from edge_group x using doomed d
     where x.partition_key = d.partition_key and x.downstream_id = d.execution_id
), cancels as (
    delete from pending_cancel x using doomed d
     where x.partition_key = d.partition_key and x.execution_id = d.execution_id
), guards as (
    -- Unless its key has been free before, and now finds another.
    delete from idempotency_guard g using doomed d
     where g.namespace = d.namespace and g.idempotency_key = d.idempotency_key
       and g.execution = '{fp:' || d.partition_key || '}:' || d.execution_id
), endings as (
    delete from ending x using doomed d
     where x.ctid = d.ending_row
), gone as (
    delete from execution e using doomed d
     where e.ctid = d.asked_row
    returning 1
)
select (select count(*) from gone) as trimmed, (select count(*) from due) as looked_at;

-- Delete ended executions past their keep time, with all that belongs to them.
with doomed as materialized (
    select partition_key, execution_id
      from execution
     where retain_until_ms is not null
       and retain_until_ms <= :before_ms::bigint
     order by retain_until_ms
     limit :limit::bigint
       for update skip locked
), attempts as (
    delete from attempt a using doomed d
     where a.partition_key = d.partition_key and a.execution_id = d.execution_id
), tags as (
    delete from execution_tag t using doomed d
     where t.partition_key = d.partition_key and t.execution_id = d.execution_id
), grants as (
    delete from claim_grant g using doomed d
     where g.partition_key = d.partition_key and g.execution_id = d.execution_id
), steps as (
    delete from step s using doomed d
     where s.partition_key = d.partition_key and s.execution_id = d.execution_id
), waiters as (
    delete from waiter w using doomed d
     where w.partition_key = d.partition_key and w.execution_id = d.execution_id
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
), gone as (
    delete from execution e using doomed d
     where e.partition_key = d.partition_key and e.execution_id = d.execution_id
    returning 1
)
select count(*) as trimmed from gone;

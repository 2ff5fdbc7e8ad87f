-- Delete members of flows, with all that belongs to them.
with doomed as materialized (
    select e.partition_key, e.execution_id
      from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
      join execution e on e.flow_id = w.flow_id and e.partition_key = w.partition_key
     limit :limit::bigint
       for update of e
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
), inputs as (
    delete from execution_input i using doomed d
     where i.partition_key = d.partition_key and i.execution_id = d.execution_id
), joins as (
    delete from edge_group j using doomed d
     where j.partition_key = d.partition_key and j.downstream_id = d.execution_id
), cancels as (
    delete from pending_cancel c using doomed d
     where c.partition_key = d.partition_key and c.execution_id = d.execution_id
), gone as (
    delete from execution e using doomed d
     where e.partition_key = d.partition_key and e.execution_id = d.execution_id
    returning 1
)
select count(*) as trimmed from gone;

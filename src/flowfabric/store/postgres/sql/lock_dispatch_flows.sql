-- Flows that have endings to tell dependents about and nobody else is busy with.
--
-- Steps from flow to flow through the primary key, however many rows each has.
with recursive waiting as (
    (select partition_key, flow_id
       from completion_dispatch
      where partition_key >= :from_partition::int
        and partition_key < :to_partition::int
      order by partition_key, flow_id
      limit 1)
    union all
    select next.partition_key, next.flow_id
      from waiting
     cross join lateral (
        select d.partition_key, d.flow_id
          from completion_dispatch d
         where (d.partition_key, d.flow_id) > (waiting.partition_key, waiting.flow_id)
           and d.partition_key < :to_partition::int
         order by d.partition_key, d.flow_id
         limit 1
     ) next
), few as (
    select partition_key, flow_id from waiting limit :candidates::bigint
)
select f.*
  from few
  join flow f using (partition_key, flow_id)
 order by f.partition_key, f.flow_id
 limit :limit::bigint
   for update of f skip locked;

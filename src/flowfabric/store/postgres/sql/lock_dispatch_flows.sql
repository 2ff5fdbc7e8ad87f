-- Flows that have endings to tell dependents about and no other transaction holds, starting
-- from some partition and coming round to it again.
--
-- Steps from flow to flow through the primary key, however many rows each has.
with recursive later as (
    (select partition_key, flow_id
       from completion_dispatch
      where partition_key >= :start::int
      order by partition_key, flow_id
      limit 1)
    union all
    select next.partition_key, next.flow_id
      from later
     cross join lateral (
        select d.partition_key, d.flow_id
          from completion_dispatch d
         where (d.partition_key, d.flow_id) > (later.partition_key, later.flow_id)
         order by d.partition_key, d.flow_id
         limit 1
     ) next
), earlier as (
    (select partition_key, flow_id
       from completion_dispatch
      where partition_key < :start::int
      order by partition_key, flow_id
      limit 1)
    union all
    select next.partition_key, next.flow_id
      from earlier
     cross join lateral (
        select d.partition_key, d.flow_id
          from completion_dispatch d
         where (d.partition_key, d.flow_id) > (earlier.partition_key, earlier.flow_id)
           and d.partition_key < :start::int
         order by d.partition_key, d.flow_id
         limit 1
     ) next
), few as (
    select partition_key, flow_id from later
    union all
    select partition_key, flow_id from earlier
     limit :candidates::bigint
)
select f.*
  from few
  join flow f using (partition_key, flow_id)
 order by f.partition_key, f.flow_id
 limit :limit::bigint
   for update of f skip locked;

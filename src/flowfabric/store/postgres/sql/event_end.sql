-- The last id of the log, and the numbers missing among its latest rows, a row for each run of
-- them: the last id before it, its first and its last number.
with latest as (
    select event_id
      from event
     order by event_id desc
     limit 100000
), pairs as (
    -- The first row of the log follows the beginning, unless these are only the latest.
    select event_id,
           coalesce(
               lag(event_id) over (order by event_id),
               case when count(*) over () < 100000 then 0 else event_id - 4096 end
           ) as before
      from latest
), gaps as (
    select before, before + 4096 as gap_first, event_id - 1 as gap_last
      from pairs
     where event_id > before + 4096
)
select ended.last_id, gaps.gap_first, gaps.gap_last,
       coalesce((select event_id + cardinality(execution_id) - 1
                   from event where event_id = gaps.before), 0)::bigint as before_gap
  from (select max(event_id + cardinality(execution_id) - 1)::bigint as last_id
          from event
         where event_id = (select max(event_id) from latest)) as ended
  left join gaps on true
 order by gaps.gap_first;

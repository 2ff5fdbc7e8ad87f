-- Flows of one partition by ascending id; those past their keep time are gone.
select *
  from flow
 where partition_key = :partition_key
   and flow_id >= :start
   and (retain_until_ms is null or retain_until_ms > :now_ms)
 order by flow_id
 limit :limit;

-- Flows by ascending id, of one namespace or of all; those past their keep time are gone.
select *
  from flow
 where flow_id >= :start
   and (cast(:namespace as text) is null or namespace = :namespace)
   and (retain_until_ms is null or retain_until_ms > :now_ms)
 order by flow_id
 limit :limit;

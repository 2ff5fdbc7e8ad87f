-- Ids of one partition in ascending order, from `start` on; of one namespace or of all.
select execution_id
  from execution
 where partition_key = :partition_key
   and execution_id >= :start
   and (cast(:namespace as text) is null
        or route_id in (select route_id from route where namespace = cast(:namespace as text)))
 order by execution_id
 limit :limit;

-- Executions, of a namespace or of any, whose uuid lies in a range and looks like a pattern, newest
-- uuids first.
select partition_key, execution_id
  from execution
 where execution_id between :low and :high
   and cast(execution_id as text) like :pattern
   and (cast(:namespace as text) is null
        or route_id in (select route_id from route where namespace = :namespace))
 order by execution_id desc
 limit :limit;

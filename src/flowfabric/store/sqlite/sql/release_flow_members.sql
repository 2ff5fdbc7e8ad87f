-- Let members of flows go with the executions that are past their keep time.
update ending
   set retain_until_ms = :now_ms
 where rowid in (
    select e.rowid
      from json_each(:rows)
     cross join ending as e
        on e.flow_id = value ->> 'flow_ids' and e.partition_key = value ->> 'partition_keys'
     where e.retain_until_ms is null
     limit :limit);
-- next
select changes() as released;

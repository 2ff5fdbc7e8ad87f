-- Whether any of the flows has a member left.
select 1 as found
  from json_each(:rows) as w
 where exists (
        select 1 from live
         where flow_id = w.value ->> 'flow_ids' and partition_key = w.value ->> 'partition_keys')
    or exists (
        select 1 from ending
         where flow_id = w.value ->> 'flow_ids' and partition_key = w.value ->> 'partition_keys')
 limit 1;

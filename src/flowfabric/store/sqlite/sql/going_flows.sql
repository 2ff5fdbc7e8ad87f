-- Of the given flows, those with members that have not ended.
select w.value as flow_id
  from json_each(:flow_ids) as w
 where exists (
        select 1
          from live
         where flow_id = w.value);

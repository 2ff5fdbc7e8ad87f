-- Of the given flows, those with members that have not ended.
select w.flow_id
  from unnest(:flow_ids::uuid[]) as w (flow_id)
 where exists (
        select 1
          from live
         where live.flow_id = w.flow_id);

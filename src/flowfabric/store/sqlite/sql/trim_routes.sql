-- Delete those of the given routes that no execution uses; look at the others again later.
update route
   set retain_until_ms = :retain_until_ms
 where route_id in (select value from json_each(:route_ids))
   and (exists (
            select 1 from live
             where live.route_id = route.route_id and ready and public_state = 'waiting')
        or exists (
            select 1 from live
             where live.route_id = route.route_id and not (ready and public_state = 'waiting'))
        or exists (select 1 from ending where ending.route_id = route.route_id)
        -- The gates of its keys go with it, and must not as long as a start counts.
        or exists (
            select 1
              from gate_route as p
             cross join gate as g on g.gate_id = p.gate_id
             cross join quota_policy as q on q.quota_policy_id = g.owner_id
             where p.route_id = route.route_id
               and g.starts ->> '$[#-1][0]' > :now_ms - q.window_ms));
-- next
delete from route
 where route_id in (select value from json_each(:route_ids))
   and not exists (
        select 1 from live
         where live.route_id = route.route_id and ready and public_state = 'waiting')
   and not exists (
        select 1 from live
         where live.route_id = route.route_id and not (ready and public_state = 'waiting'))
   and not exists (select 1 from ending where ending.route_id = route.route_id)
   and not exists (
        select 1
          from gate_route as p
         cross join gate as g on g.gate_id = p.gate_id
         cross join quota_policy as q on q.quota_policy_id = g.owner_id
         where p.route_id = route.route_id
           and g.starts ->> '$[#-1][0]' > :now_ms - q.window_ms);
-- next
delete from gate_route
 where route_id in (select value from json_each(:route_ids))
   and not exists (select 1 from route where route.route_id = gate_route.route_id);
-- next
select json_array_length(:route_ids)
           - (select count(*) from route where route_id in (select value from json_each(:route_ids)))
           as trimmed;

-- Whether a worker serves any route under limits.
select exists (
           select 1
             from json_each(:kinds) as kind
            cross join json_each(:lanes) as lane
            cross join route as r
               on r.execution_kind = kind.value and r.lane_id = lane.value and r.gated = 1)
       or (:kinds is null
           and exists (
                select 1 from route
                 where lane_id in (select value from json_each(:lanes)) and gated = 1)) as found;

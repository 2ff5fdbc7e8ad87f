-- How many executions there are in each lane, by state; those counted as ready wait for a worker.
select route.lane_id, cast(live.public_state as text) as public_state, live.ready,
       count(*) as executions
  from live
  join route on route.route_id = live.route_id
 group by route.lane_id, live.public_state, live.ready;

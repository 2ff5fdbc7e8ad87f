-- A page of all flows, those with counts that differ from what there is; the last of the page is
-- always among them. A flow that is being deleted has lost some already.
with page as materialized (
    select f.*, row_number() over (order by f.flow_id) as place
      from (select *
              from flow
             where flow_id >= :start
             order by flow_id
             limit :limit) f
), counted as (
    select p.partition_key, p.flow_id, p.place, p.going, p.node_count, p.edge_count,
           p.members_completed + p.members_failed + p.members_cancelled
               + p.members_expired + p.members_skipped as ended_count,
           (select count(*) from flow_member e where e.flow_id = p.flow_id) as members,
           (select count(*) from edge
             where edge.partition_key = p.partition_key and edge.flow_id = p.flow_id) as edges,
           (select count(*) from flow_member e
             where e.flow_id = p.flow_id
               and e.lifecycle_phase = 'terminal'
               and not exists (
                    select 1 from completion_dispatch d
                     where d.partition_key = e.partition_key
                       and d.flow_id = e.flow_id
                       and d.execution_id = e.execution_id
                       and d.replay_count = e.replay_count)) as told
      from page p
)
select partition_key, flow_id, place,
       not going and (node_count <> members or edge_count <> edges or ended_count <> told)
           as miscounted,
       node_count, members, edge_count, edges, ended_count, told
  from counted
 where place = (select max(place) from page)
    or (not going and (node_count <> members or edge_count <> edges or ended_count <> told))
 order by place;

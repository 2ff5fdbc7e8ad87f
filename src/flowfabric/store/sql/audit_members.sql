-- What a page of all flows' members shows that must not be, and where the page ends.
--
-- `ending`: it has ended, no row is queued to tell of it, and something waits for it.
-- `waiting`: it waits for its join, and that holds it back no more.
-- `given_up`: it is marked for cancellation, and not queued to be cancelled.
-- `counts`: its flow, all of which is on this page, has counted other endings than there are.
with page as materialized (
    select e.partition_key, e.flow_id, e.execution_id, e.lifecycle_phase, e.eligibility_state,
           e.cancel_requested, e.join_pending, e.awaits_child, e.replay_count,
           row_number() over (order by e.flow_id, e.execution_id) as place,
           e.lifecycle_phase = 'terminal' and not exists (
                select 1
                  from completion_dispatch d
                 where d.partition_key = e.partition_key
                   and d.flow_id = e.flow_id
                   and d.execution_id = e.execution_id
                   and d.replay_count = e.replay_count) as told
      from (select *
              from flow_member
             where flow_id is not null
               and (flow_id, execution_id) >= (:flow_id, :execution_id)
             order by flow_id, execution_id
             limit :limit) e
), whole as (
    select p.flow_id
      from page p
      join flow f on f.partition_key = p.partition_key and f.flow_id = p.flow_id
     group by p.flow_id
    having count(*) = max(f.node_count)
       and count(*) filter (where p.told) <> max(
            f.members_completed + f.members_failed + f.members_cancelled
                + f.members_expired + f.members_skipped)
), seen as (
    select p.*,
           p.told and exists (
                select 1
                  from edge
                 where edge.partition_key = p.partition_key
                   and edge.upstream_id = p.execution_id
                   and edge.edge_state = 'applied'
                   and edge.dep_state = 'unsatisfied'
                   and edge.counts_from_replay <= p.replay_count) as ending,
           p.lifecycle_phase <> 'terminal'
               and not p.cancel_requested
               and (p.join_pending
                    or (p.lifecycle_phase = 'runnable'
                        and p.eligibility_state = 'blocked_by_dependencies'
                        and not p.awaits_child))
               and coalesce((
                    select g.staged = 0 or g.group_state <> 'pending'
                      from edge_group g
                     where g.partition_key = p.partition_key
                       and g.downstream_id = p.execution_id), true) as waiting,
           p.lifecycle_phase <> 'terminal'
               and p.cancel_requested
               and not exists (
                    select 1
                      from pending_cancel c
                     where c.partition_key = p.partition_key
                       and c.execution_id = p.execution_id) as given_up,
           p.flow_id in (select flow_id from whole) as counts
      from page p
)
select partition_key, flow_id, execution_id, place, ending or waiting or given_up or counts as suspect
  from seen
 where ending or waiting or given_up or counts or place = (select max(place) from page)
 order by place;

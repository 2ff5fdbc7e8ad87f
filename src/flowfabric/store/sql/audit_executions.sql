-- A page of all executions: those that have not ended with whatever could move them, and those
-- that have ended and will never be deleted or could not be claimed again. The last of the page is
-- always among them.
with page as materialized (
    select e.*, '{fp:' || e.partition_key || '}:' || e.execution_id as wire_id,
           e.namespace is not null as route_exists,
           row_number() over (order by e.partition_key, e.execution_id) as place
      from (select *
              from execution_now
             where (partition_key, execution_id) > (:after_partition_key, :after_execution_id)
             order by partition_key, execution_id
             limit :limit) e
)
select p.partition_key, p.execution_id, p.place, p.lifecycle_phase, p.ownership_state,
       p.eligibility_state, p.ready, p.cancel_requested, p.join_pending,
       p.route_exists,
       p.flow_id is not null as in_flow,
       p.delay_until_ms, p.granted_until_ms, p.lease_expires_at_ms, p.retain_until_ms,
       exists (
            select 1 from claim_grant g
             where g.partition_key = p.partition_key
               and g.execution_id = p.execution_id
               and g.expires_at_ms = p.granted_until_ms) as granted,
       exists (
            select 1 from flow f
             where f.partition_key = p.partition_key and f.flow_id = p.flow_id) as flow_exists,
       -- One row is asked for: `exists` may be planned as reading all that are suspended.
       (select 1 from suspension s
         where s.partition_key = p.partition_key
           and s.execution_id = p.execution_id
           and s.closed_at_ms is null
         limit 1) is not null as suspended,
       (select s.timeout_at_ms from suspension s
         where s.partition_key = p.partition_key
           and s.execution_id = p.execution_id
           and s.closed_at_ms is null) as suspension_due_ms,
       (select count(*) from waitpoint w
         where w.partition_key = p.partition_key
           and w.execution_id = p.execution_id
           and w.state <> 'closed') as open_waitpoints,
       (select g.group_state from edge_group g
         where g.partition_key = p.partition_key
           and g.downstream_id = p.execution_id) as group_state,
       coalesce((
            select g.staged from edge_group g
             where g.partition_key = p.partition_key
               and g.downstream_id = p.execution_id), 0) as group_staged,
       -- An edge will resolve when it is applied, when its upstream ends or that is told, or when
       -- an upstream that ended before the downstream's replay is replayed itself. A quorum with
       -- too few edges waits for more, or for its cancellation once the flow is closed.
       exists (
            select 1 from edge_group g
             where g.partition_key = p.partition_key
               and g.downstream_id = p.execution_id
               and ((g.k > g.staged
                     and exists (
                        select 1 from flow f
                         where f.partition_key = g.partition_key
                           and f.flow_id = g.flow_id
                           and f.public_flow_state = 'open'))
                    or exists (
                        select 1 from pending_cancel c
                         where c.partition_key = g.partition_key
                           and c.execution_id = g.downstream_id)
                    or exists (
                        select 1 from edge
                         where edge.partition_key = g.partition_key
                           and edge.downstream_id = g.downstream_id
                           and edge.dep_state = 'unsatisfied'
                           and (edge.edge_state = 'pending'
                                -- A value is asked for: `exists` may be planned as reading all.
                                or (select u.lifecycle_phase <> 'terminal'
                                           or u.replay_count < edge.counts_from_replay
                                      from execution_now u
                                     where u.partition_key = edge.partition_key
                                       and u.execution_id = edge.upstream_id)
                                or exists (
                                    select 1 from completion_dispatch d
                                     where d.partition_key = edge.partition_key
                                       and d.flow_id = edge.flow_id
                                       and d.execution_id = edge.upstream_id
                                       and d.replay_count >= edge.counts_from_replay)))))
           as join_moves,
       exists (
            select 1 from waiter w
             where w.waiting = p.wire_id
               and (select a.lifecycle_phase <> 'terminal' or a.awaited
                      from execution_now a
                     where a.partition_key = w.partition_key
                       and a.execution_id = w.execution_id)) as awaits_child,
       exists (
            select 1 from pending_cancel c
             where c.partition_key = p.partition_key
               and c.execution_id = p.execution_id) as cancel_queued
  from page p
 where p.lifecycle_phase <> 'terminal'
    or p.retain_until_ms is null
    or not p.route_exists
    or p.place = (select max(place) from page)
 order by p.place;

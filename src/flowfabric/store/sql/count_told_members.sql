-- How many members of a flow have ended in which state, dependents told, how many of them a
-- join gave up, and when the last of them ended.
select public_state, count(*) as members, max(completed_at_ms) as last_ended_at_ms,
       count(*) filter (where cancellation_reason in (:satisfied, :impossible)) as spared
  from flow_member e
 where flow_id = :flow_id
   and lifecycle_phase = 'terminal'
   and not exists (
        select 1
          from completion_dispatch d
         where d.partition_key = e.partition_key
           and d.flow_id = e.flow_id
           and d.execution_id = e.execution_id
           and d.replay_count = e.replay_count)
 group by public_state;

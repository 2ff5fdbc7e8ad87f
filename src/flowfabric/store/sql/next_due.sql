-- When each reconciler has something to do next, null for never; and the time.
select coalesce(:clock, (select now_ms from this_moment)) as now_ms,
       (select min(lease_expires_at_ms) from live
         where lifecycle_phase = 'active' and ownership_state = 'leased') as lease_expiry,
       (select min(expires_at_ms) + 1 from claim_grant) as grant_expiry,
       (select min(due_at_ms)
          from (select min(expires_at_ms) as due_at_ms from worker
                union all
                select min(event_at_ms) + :event_retention_ms from worker_event) as workers)
           as worker_expiry,
       (select min(delay_until_ms) from live
         where eligibility_state = 'not_eligible_until_time') as delayed,
       (select min(attempt_deadline_ms) from live
         where attempt_deadline_ms is not null) as attempt_timeout,
       (select min(deadline_at_ms) from live
         where deadline_at_ms is not null) as deadline,
       (select min(timeout_at_ms) from suspension
         where closed_at_ms is null and timeout_at_ms is not null) as suspension_timeout,
       (select min(expires_at_ms) from waitpoint
         where state = 'pending' and expires_at_ms is not null) as waitpoint_expiry,
       (select min(retain_until_ms) from ending
         where retain_until_ms is not null) as retention,
       (select occurred_at_ms + :event_retention_ms from event
         order by event_id limit 1) as event_retention,
       (select min(expires_at_ms) from idempotency_guard
         where expires_at_ms is not null) as guard_retention,
       (select min(retain_until_ms) from route) as route_retention,
       (select min(expires_at_ms) from stream
         where expires_at_ms is not null) as stream_retention,
       (select min(completed_at_ms) from ending
         where awaited) as awaited,
       (select min(next_due_at_ms) from schedule
         where next_due_at_ms is not null) as schedules,
       (select min(next_reset_at_ms) from budget
         where next_reset_at_ms is not null) as budget_reset,
       (select min(check_at_ms) from budget_reservation) as budget_reservations,
       (select min(act_at_ms) from budget
         where act_at_ms is not null) as budget_action,
       (select min(due_at_ms)
          from (select min(keep_until_ms) as due_at_ms from budget_report
                union all
                select min(keep_until_ms) from budget_spend) as kept) as budget_retention,
       -- Whatever is queued is due; one row of the key's index says that there is one.
       (select enqueued_at_ms from completion_dispatch
         order by partition_key, flow_id, execution_id, replay_count limit 1) as dispatch,
       (select min(due_at_ms) from pending_cancel) as member_cancel,
       (select min(created_at_ms) + :edge_apply_after_ms from edge
         where edge_state = 'pending') as edge_apply,
       (select min(retain_until_ms) from flow
         where retain_until_ms is not null) as flow_retention,
       (select due_at_ms from flow_audit
         where exists (select 1 from flow) or exists (select 1 from waiter)) as flow_audit;

-- How the given executions ended, and which of them do not exist; those under way are left out.
select w.partition_key, w.execution_id, e.public_state, e.result, e.failure_reason,
       e.cancellation_reason,
       case when e.public_state = 'expired' then e.policy end as expired_policy
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  left join lateral (
    select *
      from execution
     where execution.partition_key = w.partition_key
       and execution.execution_id = w.execution_id
     limit 1
 ) e on true
 where e.lifecycle_phase is null
    or e.lifecycle_phase = 'terminal';

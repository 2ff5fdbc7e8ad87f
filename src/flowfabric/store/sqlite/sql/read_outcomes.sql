-- How the given executions ended, and which of them do not exist; those under way are left out.
select w.value ->> 'partition_keys' as partition_key, w.value ->> 'execution_ids' as execution_id,
       e.public_state, e.result, e.failure_reason, e.cancellation_reason,
       case when e.public_state = 'expired' then e.policy end as expired_policy
  from json_each(:rows) as w
  left join execution as e
    on e.partition_key = w.value ->> 'partition_keys'
   and e.execution_id = w.value ->> 'execution_ids'
 where e.lifecycle_phase is null
    or e.lifecycle_phase = 'terminal';

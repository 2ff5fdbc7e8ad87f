-- How the given executions ended, and which of them do not exist; those under way are left out.
select w.value ->> 'partition_keys' as partition_key, w.value ->> 'execution_ids' as execution_id,
       n.public_state, n.result, n.failure_reason, n.cancellation_reason,
       case when n.public_state = 'expired' then e.policy end as expired_policy
  from json_each(:rows) as w
  left join execution as e
    on e.partition_key = w.value ->> 'partition_keys'
   and e.execution_id = w.value ->> 'execution_ids'
  left join ending as n on n.execution_rowid = e.execution_rowid
 where n.execution_rowid is not null
    or e.execution_rowid is null;

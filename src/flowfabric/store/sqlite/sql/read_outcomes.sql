-- How the given executions ended, and which of them do not exist; those under way are left out.
select w.value ->> 'partition_keys' as partition_key, w.value ->> 'execution_ids' as execution_id,
       n.public_state, n.result, n.failure_reason, n.cancellation_reason,
       case when n.public_state = 'expired' then (
           select e.policy
             from execution e
            where e.partition_key = n.partition_key
              and e.execution_id = n.execution_id) end as expired_policy
  from json_each(:rows) as w
  left join ending as n
    on n.partition_key = w.value ->> 'partition_keys'
   and n.execution_id = w.value ->> 'execution_ids'
 where n.execution_id is not null
    or not exists (
        select 1 from execution e
         where e.partition_key = w.value ->> 'partition_keys'
           and e.execution_id = w.value ->> 'execution_ids');

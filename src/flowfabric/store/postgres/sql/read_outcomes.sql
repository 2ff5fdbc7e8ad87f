-- How the given executions ended, and which of them do not exist; those under way are left out.
select w.partition_key, w.execution_id, n.public_state::text as public_state, n.result, n.failure_reason,
       n.cancellation_reason,
       case when n.public_state = 'expired' then (
           select e.policy
             from execution e
            where e.partition_key = w.partition_key
              and e.execution_id = w.execution_id) end as expired_policy
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as w (partition_key, execution_id)
  left join lateral (
    select public_state, result, failure_reason, cancellation_reason
      from ending
     where ending.partition_key = w.partition_key
       and ending.execution_id = w.execution_id
     limit 1
 ) n on true
 where n.public_state is not null
    or not exists (
        select from execution e
         where e.partition_key = w.partition_key
           and e.execution_id = w.execution_id
        offset 0);

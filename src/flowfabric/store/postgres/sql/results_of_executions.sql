-- How the given executions ended, and what they left.
select e.partition_key, e.execution_id, e.terminal_outcome::text as outcome,
       coalesce(e.replay_count, 0) as replay_count,
       e.result, e.result_encoding
  from unnest(:execution_ids::uuid[]) as w (execution_id)
 cross join lateral (
    select *
      from ending
     where ending.partition_key = :partition_key::int
       and ending.execution_id = w.execution_id
     limit 1
 ) e;

-- What a join needs to know of executions: where they belong and how they ended.
select e.*
  from unnest(:execution_ids::uuid[]) as w (execution_id)
 cross join lateral (
    select execution_now.partition_key, execution_now.execution_id, execution_now.flow_id,
           execution_now.terminal_outcome, execution_now.replay_count
      from execution_now
     where execution_now.partition_key = :partition_key::int
       and execution_now.execution_id = w.execution_id
     limit 1
 ) e;

-- What a join needs to know of executions: where they belong and how they ended.
select e.*
  from unnest(:execution_ids::uuid[]) as w (execution_id)
 cross join lateral (
    select execution.partition_key, execution.execution_id, execution.flow_id,
           execution.terminal_outcome, execution.replay_count
      from execution
     where execution.partition_key = :partition_key::int
       and execution.execution_id = w.execution_id
     limit 1
 ) e;

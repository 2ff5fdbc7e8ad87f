-- What a join needs to know of executions: where they belong and how they ended.
select e.partition_key, e.execution_id, e.flow_id, e.terminal_outcome, e.replay_count
  from unnest(:execution_ids::uuid[]) as w (execution_id)
  join execution e on e.partition_key = :partition_key::int and e.execution_id = w.execution_id;

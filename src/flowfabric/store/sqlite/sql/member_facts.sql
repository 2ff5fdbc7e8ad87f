-- What a join needs to know of executions: where they belong and how they ended.
select e.partition_key, e.execution_id, e.flow_id, e.terminal_outcome, e.replay_count
  from json_each(:execution_ids) as w
 cross join execution_now as e
    on e.partition_key = :partition_key and e.execution_id = w.value;

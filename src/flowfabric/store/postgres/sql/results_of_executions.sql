-- How the given executions ended, and what they left.
select e.partition_key, e.execution_id, e.terminal_outcome, e.result, e.result_encoding
  from unnest(:execution_ids::uuid[]) as w (execution_id)
  join execution e on e.partition_key = :partition_key::int and e.execution_id = w.execution_id
 where e.lifecycle_phase = 'terminal';

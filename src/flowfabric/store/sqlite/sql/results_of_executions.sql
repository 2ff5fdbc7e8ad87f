-- How the given executions ended, and what they left.
select e.partition_key, e.execution_id, e.terminal_outcome as outcome, e.replay_count,
       e.result, e.result_encoding
  from json_each(:execution_ids) as w
 cross join execution as x on x.partition_key = :partition_key and x.execution_id = w.value
 cross join ending as e on e.execution_rowid = x.execution_rowid;

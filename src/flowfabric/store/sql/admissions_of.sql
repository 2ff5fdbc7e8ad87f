-- The slots of a policy that were taken by hand for an execution.
select a.gate_id, a.partition_key, a.execution_id, a.replay_count, a.admitted_at_ms
  from gate g
  join admission a on a.gate_id = g.gate_id
 where g.owner_id = :owner_id
   and a.partition_key = :partition_key
   and a.execution_id = :execution_id
 order by a.gate_id;

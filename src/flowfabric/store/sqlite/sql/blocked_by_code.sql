-- Executions of some kinds that changed code stopped before a time, longest ago first.
select partition_key, execution_id
  from execution
 where blocking_reason = 'waiting_for_code'
   and execution_kind in (select value from json_each(:kinds))
   and (:namespace is null or namespace = :namespace)
   and last_transition_at_ms <= :blocked_before_ms
 order by last_transition_at_ms
 limit :limit;

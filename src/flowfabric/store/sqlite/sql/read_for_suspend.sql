-- An execution with its current attempt, where that has a row, and the key that signs tokens.
select e.*, e.execution_id as execution_now,
       a.*, a.attempt_id as attempt,
       h.*, h.kid as waitpoint_hmac,
       :clock as now_ms
  from execution_now as e
  left join attempt as a
    on a.partition_key = e.partition_key
   and a.execution_id = e.execution_id
   and a.attempt_index = e.current_attempt_index
  left join waitpoint_hmac as h
    on h.expires_at_ms is null
 where e.partition_key = :partition_key
   and e.execution_id = :execution_id;

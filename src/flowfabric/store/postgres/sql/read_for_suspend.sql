-- An execution with its current attempt, where that has a row, and the key that signs tokens.
--
-- The key is read, not compared: it is the same row for everybody who suspends.
select e.*, e.version as execution_now,
       a.*, a.xmin as attempt,
       h.*, h.kid as waitpoint_hmac,
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from execution_now e
  left join attempt a
    on a.partition_key = e.partition_key
   and a.execution_id = e.execution_id
   and a.attempt_index = e.current_attempt_index
  left join waitpoint_hmac h
    on h.expires_at_ms is null
 where e.partition_key = :partition_key
   and e.execution_id = :execution_id;

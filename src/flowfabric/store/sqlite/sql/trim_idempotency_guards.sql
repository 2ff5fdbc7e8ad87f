-- Delete idempotency guards that have expired.
delete from idempotency_guard
 where (namespace, idempotency_key) in (
    select namespace, idempotency_key
      from idempotency_guard
     where expires_at_ms <= :before_ms
     order by expires_at_ms
     limit :limit);
-- next
select changes() as trimmed;

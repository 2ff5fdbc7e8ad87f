-- Delete idempotency guards that have expired.
with gone as (
    delete from idempotency_guard
     where (namespace, idempotency_key) in (
        select namespace, idempotency_key
          from idempotency_guard
         where expires_at_ms <= :before_ms::bigint
         order by expires_at_ms
         limit :limit::bigint
           for update skip locked)
    returning 1
)
select count(*) as trimmed from gone;

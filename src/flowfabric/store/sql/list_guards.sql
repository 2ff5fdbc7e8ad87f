-- A page of all idempotency keys with the executions they stand for.
select namespace, idempotency_key, execution
  from idempotency_guard
 where (namespace, idempotency_key) > (:after_namespace, :after_key)
 order by namespace, idempotency_key
 limit :limit;

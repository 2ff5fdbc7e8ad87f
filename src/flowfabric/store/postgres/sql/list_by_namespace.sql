-- Executions of one namespace, newest first.
select *
  from execution
 where namespace = :namespace
   and public_state = any(:states::text[])
   and (:lane_id::text is null or lane_id = :lane_id)
   and (:execution_kind::text is null or execution_kind = :execution_kind)
   and created_at_ms > :created_after_ms::bigint
   and created_at_ms < :created_before_ms::bigint
   and (created_at_ms, execution_id) < (:before_ms::bigint, :before_id::uuid)
 order by created_at_ms desc, execution_id desc
 limit :limit::bigint;

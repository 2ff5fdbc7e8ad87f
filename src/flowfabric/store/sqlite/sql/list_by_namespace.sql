-- Executions of one namespace, newest first.
select *
  from execution indexed by execution_by_namespace
 where namespace = :namespace
   and public_state in (select value from json_each(:states))
   and (:lane_id is null or lane_id = :lane_id)
   and (:execution_kind is null or execution_kind = :execution_kind
        or substr(execution_kind, 1, length(:versions_of)) = :versions_of)
   and created_at_ms > :created_after_ms
   and created_at_ms <= min(:before_ms, :created_before_ms - 1)
   and (created_at_ms < :before_ms
        or (execution_id, partition_key) < (:before_id, :before_partition))
 order by created_at_ms desc, execution_id desc, partition_key desc
 limit :limit;

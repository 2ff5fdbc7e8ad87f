-- Executions that carry one tag, newest first.
select e.*
  from execution_tag as t
 cross join execution_now as e
    on e.partition_key = t.partition_key and e.execution_id = t.execution_id
 where t.tag_key = :tag_key
   and t.tag_value = :tag_value
   and t.created_at_ms > :created_after_ms
   and t.created_at_ms <= min(:before_ms, :created_before_ms - 1)
   and (t.created_at_ms < :before_ms
        or (t.execution_id, t.partition_key) < (:before_id, :before_partition))
   and e.public_state in (select value from json_each(:states))
   and (:namespace is null or e.namespace = :namespace)
   and (:lane_id is null or e.lane_id = :lane_id)
   and (:execution_kind is null or e.execution_kind = :execution_kind
        or substr(e.execution_kind, 1, length(:versions_of)) = :versions_of)
 order by t.created_at_ms desc, t.execution_id desc, t.partition_key desc
 limit :limit;

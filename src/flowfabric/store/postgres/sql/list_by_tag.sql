-- Executions that carry one tag, newest first.
select e.*
  from execution_tag t
 cross join lateral (
    select *
      from execution_now
     where execution_now.partition_key = t.partition_key
       and execution_now.execution_id = t.execution_id
     limit 1
 ) e
 where t.tag_key = :tag_key
   and hashtextextended(t.tag_value, 0) = hashtextextended(:tag_value::text, 0)
   and t.tag_value = :tag_value
   and t.created_at_ms > :created_after_ms::bigint
   and t.created_at_ms <= least(:before_ms::bigint, :created_before_ms::bigint - 1)
   and (t.created_at_ms < :before_ms::bigint
        or (t.execution_id, t.partition_key) < (:before_id::uuid, :before_partition::int))
   and e.public_state = any(:states::text[])
   and (:namespace::text is null or e.namespace = :namespace)
   and (:lane_id::text is null or e.lane_id = :lane_id)
   and (:execution_kind::text is null or e.execution_kind = :execution_kind
        or substr(e.execution_kind, 1, length(:versions_of::text)) = :versions_of)
 order by t.created_at_ms desc, t.execution_id desc, t.partition_key desc
 limit :limit::bigint;

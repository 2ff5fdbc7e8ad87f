-- Those of the given executions that are of a kind, in a namespace and have a tag; null asks for none.
select k.partition_key, k.execution_id::text as execution_id
  from unnest(:partition_keys::int[], :execution_ids::uuid[]) as k (partition_key, execution_id)
 cross join lateral (
    select r.execution_kind, r.namespace
      from execution x
      join route r on r.route_id = x.route_id
     where x.partition_key = k.partition_key
       and x.execution_id = k.execution_id
     limit 1) as e
 where (:namespace::text is null or e.namespace = :namespace)
   and (:execution_kind::text is null
        or e.execution_kind = :execution_kind
        or starts_with(e.execution_kind, :execution_kind || '@'))
   and (:tag_key::text is null
        or exists (
            select from execution_tag t
             where t.partition_key = k.partition_key
               and t.execution_id = k.execution_id
               and t.tag_key = :tag_key
               and t.tag_value = :tag_value::text));

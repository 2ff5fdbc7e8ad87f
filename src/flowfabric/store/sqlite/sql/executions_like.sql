-- Those of the given executions that are of a kind, in a namespace and have a tag; null asks for none.
select e.partition_key, e.execution_id
  from json_each(:rows) as k
 cross join execution as e
    on e.partition_key = k.value ->> 'partition_keys'
   and e.execution_id = k.value ->> 'execution_ids'
 cross join route as r on r.route_id = e.route_id
 where (cast(:namespace as text) is null or r.namespace = :namespace)
   and (cast(:execution_kind as text) is null
        or r.execution_kind = :execution_kind
        or substr(r.execution_kind, 1, length(:execution_kind) + 1) = :execution_kind || '@')
   and (cast(:tag_key as text) is null
        or exists (
            select 1 from execution_tag as t
             where t.partition_key = e.partition_key
               and t.execution_id = e.execution_id
               and t.tag_key = :tag_key
               and t.tag_value = :tag_value));

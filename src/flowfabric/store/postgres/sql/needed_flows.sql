-- Those of the given flows with a member that is still needed; see `trim_executions.sql`.
select w.flow_id
  from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
 where exists (
    select from flow_member m
      join execution d
        on d.partition_key = m.partition_key and d.execution_id = m.execution_id
     where m.flow_id = w.flow_id
       and m.partition_key = w.partition_key
       and (m.awaited
            or exists (
                select from live p
                 where p.partition_key
                       = split_part(substr(d.parent_execution_id, 5), '}', 1)::int
                   and p.execution_id = right(d.parent_execution_id, 36)::uuid
                offset 0)
            or exists (
                select from ending p
                 where p.partition_key
                       = split_part(substr(d.parent_execution_id, 5), '}', 1)::int
                   and p.execution_id = right(d.parent_execution_id, 36)::uuid
                   and p.terminal_outcome <> 'success'
                offset 0)
            or exists (
                select from waiter t
                  join live p
                    on p.partition_key = split_part(substr(t.waiting, 5), '}', 1)::int
                   and p.execution_id = right(t.waiting, 36)::uuid
                 where t.partition_key = d.partition_key
                   and t.execution_id = d.execution_id
                offset 0)));

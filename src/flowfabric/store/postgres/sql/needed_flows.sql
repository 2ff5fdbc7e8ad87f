-- Those of the given flows with a member that somebody still needs; see `trim_executions.sql`.
select w.partition_key, w.flow_id
  from unnest(:partition_keys::int[], :flow_ids::uuid[]) as w (partition_key, flow_id)
 where exists (
    select from execution d
     where d.flow_id = w.flow_id
       and d.partition_key = w.partition_key
       and (d.awaited
            or exists (
                select from execution p
                 where p.partition_key
                       = split_part(substr(d.parent_execution_id, 5), '}', 1)::int
                   and p.execution_id = right(d.parent_execution_id, 36)::uuid
                   and p.terminal_outcome <> 'success'
                offset 0)
            or exists (
                select from waiter t
                  join execution p
                    on p.partition_key = split_part(substr(t.waiting, 5), '}', 1)::int
                   and p.execution_id = right(t.waiting, 36)::uuid
                 where t.partition_key = d.partition_key
                   and t.execution_id = d.execution_id
                   and p.lifecycle_phase <> 'terminal'
                offset 0)));

-- Those of the given flows with a member that is still needed; see `trim_executions.sql`.
select w.value ->> 'flow_ids' as flow_id
  from json_each(:rows) as w
 where exists (
    select 1 from flow_member m
     cross join execution d
        on d.partition_key = m.partition_key and d.execution_id = m.execution_id
     where m.flow_id = w.value ->> 'flow_ids'
       and m.partition_key = w.value ->> 'partition_keys'
       and (m.awaited
            or exists (
                select 1 from live p
                 where p.execution_rowid = (
                          select k.execution_rowid from execution k
                           where k.partition_key = cast(substr(d.parent_execution_id, 5) as integer) and k.execution_id = substr(d.parent_execution_id, -36)))
            or exists (
                select 1 from ending p
                 where p.execution_rowid = (
                          select k.execution_rowid from execution k
                           where k.partition_key = cast(substr(d.parent_execution_id, 5) as integer) and k.execution_id = substr(d.parent_execution_id, -36))
                   and p.terminal_outcome <> 'success')
            or exists (
                select 1 from waiter t
                  cross join live p
                    on p.execution_rowid = (
                          select k.execution_rowid from execution k
                           where k.partition_key = cast(substr(t.waiting, 5) as integer) and k.execution_id = substr(t.waiting, -36))
                 where t.partition_key = d.partition_key
                   and t.execution_id = d.execution_id)));

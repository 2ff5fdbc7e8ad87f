-- What those of the given executions wait for that wait only for others who wait in turn: nothing
-- else will move them. A row for each.
select x.partition_key, x.execution_id,
       w.partition_key as awaited_partition_key, w.execution_id as awaited_execution_id
  from json_each(:rows) as asked
 cross join execution as x
    on x.partition_key = asked.value ->> 'partition_keys'
   and x.execution_id = asked.value ->> 'execution_ids'
   and x.awaits_child
   and x.lifecycle_phase = 'runnable'
   and x.eligibility_state = 'blocked_by_dependencies'
   and not x.cancel_requested
   and x.deadline_at_ms is null
  join waiter w
    on w.waiting = '{fp:' || x.partition_key || '}:' || x.execution_id
  join execution a
    on a.partition_key = w.partition_key
   and a.execution_id = w.execution_id
   and a.lifecycle_phase <> 'terminal'
 where not exists (
        select 1
          from waiter other
          join execution e
            on e.partition_key = other.partition_key
           and e.execution_id = other.execution_id
         where other.waiting = w.waiting
           and (e.awaited and e.lifecycle_phase = 'terminal'
                or e.lifecycle_phase <> 'terminal'
                and (not e.awaits_child
                     or e.lifecycle_phase <> 'runnable'
                     or e.eligibility_state <> 'blocked_by_dependencies'
                     or e.cancel_requested
                     or e.deadline_at_ms is not null)))
 order by x.partition_key, x.execution_id, w.partition_key, w.execution_id
 limit :limit;

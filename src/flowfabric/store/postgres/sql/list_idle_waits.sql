-- What those of the given executions wait for that wait only for others who wait in turn: nothing
-- else will move them. A row for each.
select x.partition_key, x.execution_id,
       w.partition_key as awaited_partition_key, w.execution_id as awaited_execution_id
  from unnest(:partition_keys::int[], :execution_ids::uuid[])
           as asked (partition_key, execution_id)
  join live x
    on x.partition_key = asked.partition_key
   and x.execution_id = asked.execution_id
   and x.awaits_child
   and x.lifecycle_phase = 'runnable'
   and x.eligibility_state = 'blocked_by_dependencies'
   and x.cancel_requested is not true
   and x.deadline_at_ms is null
  join waiter w
    on w.waiting = '{fp:' || x.partition_key || '}:' || x.execution_id
  join live a
    on a.partition_key = w.partition_key
   and a.execution_id = w.execution_id
 where not exists (
        select 1
          from waiter other
          join live l
            on l.partition_key = other.partition_key
           and l.execution_id = other.execution_id
         where other.waiting = w.waiting
           and (l.awaits_child is not true
                or l.lifecycle_phase <> 'runnable'
                or l.eligibility_state is distinct from 'blocked_by_dependencies'
                or l.cancel_requested
                or l.deadline_at_ms is not null))
   and not exists (
        select 1
          from waiter other
          join ending n
            on n.partition_key = other.partition_key
           and n.execution_id = other.execution_id
         where other.waiting = w.waiting
           and n.awaited)
 order by x.partition_key, x.execution_id, w.partition_key, w.execution_id
 limit :limit;

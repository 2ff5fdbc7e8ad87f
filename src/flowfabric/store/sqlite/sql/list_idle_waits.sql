-- What those of the given executions wait for that wait only for others who wait in turn: nothing
-- else will move them. A row for each.
select x.partition_key, x.execution_id,
       w.partition_key as awaited_partition_key, w.execution_id as awaited_execution_id
  from json_each(:rows) as asked
 cross join execution as k
    on k.partition_key = asked.value ->> 'partition_keys'
   and k.execution_id = asked.value ->> 'execution_ids'
 cross join live as x
    on x.execution_rowid = k.execution_rowid
   and x.awaits_child
   and x.lifecycle_phase = 'runnable'
   and x.eligibility_state = 'blocked_by_dependencies'
   and not x.cancel_requested
   and x.deadline_at_ms is null
  join waiter w
    on w.waiting = '{fp:' || x.partition_key || '}:' || x.execution_id
  join live a
    on a.execution_rowid = (
           select k.execution_rowid from execution k
            where k.partition_key = w.partition_key and k.execution_id = w.execution_id)
 where not exists (
        select 1
          from waiter other
          join live l
            on l.execution_rowid = (
                   select k.execution_rowid from execution k
                    where k.partition_key = other.partition_key and k.execution_id = other.execution_id)
         where other.waiting = w.waiting
           and (not l.awaits_child
                or l.lifecycle_phase <> 'runnable'
                or l.eligibility_state is not 'blocked_by_dependencies'
                or l.cancel_requested
                or l.deadline_at_ms is not null))
   and not exists (
        select 1
          from waiter other
          join ending n
            on n.execution_rowid = (
                   select k.execution_rowid from execution k
                    where k.partition_key = other.partition_key and k.execution_id = other.execution_id)
         where other.waiting = w.waiting
           and n.awaited)
 order by x.partition_key, x.execution_id, w.partition_key, w.execution_id
 limit :limit;

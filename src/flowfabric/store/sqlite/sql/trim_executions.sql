-- Delete ended executions past their keep time, with all that belongs to them.
--
-- One that is still needed stays: until what waited for it has been woken, as long as
-- anybody who waited for it has not ended, and as long as its parent has not succeeded: one that
-- failed may be replayed. It is looked at again after as long as it has been kept already, within
-- limits, so that those that stay cost little.
--
-- The uuid comes first in each comparison: the other way round SQLite searches by the
-- partition alone, and most executions share one.
delete from temp.trimming;
-- next
insert into temp.trimming (execution_rowid, partition_key, execution_id, needed)
select d.execution_rowid, d.partition_key, d.execution_id,
       d.awaited
       or exists (
            select 1 from live p
             where p.execution_rowid = (
                      select k.execution_rowid from execution k
                       where k.partition_key = cast(substr(e.parent_execution_id, 5) as integer) and k.execution_id = substr(e.parent_execution_id, -36)))
       or exists (
            select 1 from ending p
             where p.execution_rowid = (
                      select k.execution_rowid from execution k
                       where k.partition_key = cast(substr(e.parent_execution_id, 5) as integer) and k.execution_id = substr(e.parent_execution_id, -36))
               and p.terminal_outcome <> 'success')
       or exists (
            select 1 from waiter w
              cross join live p
                on p.execution_rowid = (
                      select k.execution_rowid from execution k
                       where k.partition_key = cast(substr(w.waiting, 5) as integer) and k.execution_id = substr(w.waiting, -36))
             where w.partition_key = d.partition_key
               and w.execution_id = d.execution_id)
  from ending d
 cross join execution e
    on e.execution_rowid = d.execution_rowid
 where d.retain_until_ms is not null
   and d.retain_until_ms <= :before_ms
-- within d
 order by d.retain_until_ms
 limit :limit;
-- next
update ending
   set retain_until_ms = :before_ms
       + min(max(:before_ms - completed_at_ms, :held_ms_min), :held_ms_max)
 where execution_rowid in (select execution_rowid from temp.trimming where needed);
-- next
delete from attempt
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from execution_tag
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from claim_grant
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
-- There may be many frames: they go by and by, and the summaries with them.
update stream set expires_at_ms = 0, forgotten = 1
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from step
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from waiter
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from waiter
 where waiting in (select '{fp:' || partition_key || '}:' || execution_id from temp.doomed);
-- next
delete from suspension
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from waitpoint
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from signal
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from signal_dedup
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from suspend_dedup
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from execution_input
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from edge_group
 where (downstream_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
delete from pending_cancel
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.doomed);
-- next
-- Unless its key has been free before, and now finds another.
delete from idempotency_guard
 where (namespace, idempotency_key) in (
    select r.namespace, e.idempotency_key
      from temp.doomed d
     cross join execution e
        on e.execution_rowid = d.execution_rowid
     cross join route r on r.route_id = e.route_id
     where e.idempotency_key is not null)
   and execution in (select '{fp:' || partition_key || '}:' || execution_id from temp.doomed);
-- next
delete from execution where execution_rowid in (select execution_rowid from temp.doomed);
-- next
delete from ending where execution_rowid in (select execution_rowid from temp.doomed);
-- next
select count(*) filter (where not needed) as trimmed, count(*) as looked_at from temp.trimming;

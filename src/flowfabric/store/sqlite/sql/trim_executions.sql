-- Delete ended executions past their keep time, with all that belongs to them.
--
-- The uuid comes first in each comparison: the other way round SQLite searches by the
-- partition alone, and most executions share one.
delete from temp.trimming;
-- next
insert into temp.trimming (execution_rowid, partition_key, execution_id)
select rowid, partition_key, execution_id
  from execution
 where retain_until_ms is not null
   and retain_until_ms <= :before_ms
 order by retain_until_ms
 limit :limit;
-- next
delete from attempt
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from execution_tag
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from claim_grant
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from step
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from waiter
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from suspension
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from waitpoint
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from signal
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from signal_dedup
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from suspend_dedup
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from execution_input
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from edge_group
 where (downstream_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from pending_cancel
 where (execution_id, partition_key) in (select execution_id, partition_key from temp.trimming);
-- next
delete from execution where rowid in (select execution_rowid from temp.trimming);
-- next
select count(*) as trimmed from temp.trimming;

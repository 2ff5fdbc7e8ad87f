-- Delete members of flows, with all that belongs to them.
delete from temp.trimming;
-- next
insert into temp.trimming (execution_rowid, partition_key, execution_id)
select e.rowid, e.partition_key, e.execution_id
  from json_each(:rows)
 cross join execution as e
    on e.flow_id = value ->> 'flow_ids' and e.partition_key = value ->> 'partition_keys'
 limit :limit;
-- next
delete from attempt
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from execution_tag
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from claim_grant
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from execution_input
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from edge_group
 where (partition_key, downstream_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from pending_cancel
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from step
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from waiter
 where (partition_key, execution_id) in (select partition_key, execution_id from temp.trimming);
-- next
delete from execution where rowid in (select execution_rowid from temp.trimming);
-- next
select count(*) as trimmed from temp.trimming;

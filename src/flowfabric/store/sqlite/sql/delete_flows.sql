-- Delete flows that have no members and edges left.
delete from flow_tag where flow_id in (select value ->> 'flow_ids' from json_each(:rows));
-- next
delete from pending_cancel where flow_id in (select value ->> 'flow_ids' from json_each(:rows));
-- next
delete from completion_dispatch
 where (partition_key, flow_id) in (
    select value ->> 'partition_keys', value ->> 'flow_ids' from json_each(:rows));
-- next
delete from flow
 where (partition_key, flow_id) in (
    select value ->> 'partition_keys', value ->> 'flow_ids' from json_each(:rows));

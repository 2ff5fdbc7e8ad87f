-- Delete flows that have no members and edges left.
delete from flow_tag where flow_id in (select value from json_each(:flow_ids));
-- next
delete from pending_cancel where flow_id in (select value from json_each(:flow_ids));
-- next
delete from completion_dispatch where flow_id in (select value from json_each(:flow_ids));
-- next
delete from flow
 where flow_id in (select value from json_each(:flow_ids))
   and partition_key in (select value from json_each(:partition_keys));

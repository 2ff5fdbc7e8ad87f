-- Whether any of the flows has a member left.
select 1 as found
  from json_each(:rows)
 cross join execution as e
    on e.flow_id = value ->> 'flow_ids' and e.partition_key = value ->> 'partition_keys'
 limit 1;

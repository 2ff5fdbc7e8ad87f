-- Delete the frames of the given streams up to a number of each.
delete from frame
 where (execution_id, partition_key, attempt_index, frame_id) in (
    select f.execution_id, f.partition_key, f.attempt_index, f.frame_id
      from json_each(:rows) as k
     cross join frame as f
        on f.partition_key = k.value ->> 'partition_keys'
       and f.execution_id = k.value ->> 'execution_ids'
       and f.attempt_index = k.value ->> 'attempt_indexes'
       -- The numbers grow with the ids, which the key has in order: the first one kept is near.
       and f.frame_id < coalesce((
            select g.frame_id
              from frame as g
             where g.partition_key = k.value ->> 'partition_keys'
               and g.execution_id = k.value ->> 'execution_ids'
               and g.attempt_index = k.value ->> 'attempt_indexes'
               and g.frame_number > k.value ->> 'throughs'
             order by g.frame_id
             limit 1), 9223372036854775807));
-- next
select changes() as trimmed;

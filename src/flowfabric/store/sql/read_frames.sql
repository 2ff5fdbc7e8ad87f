-- Frames of one stream from one id to another, oldest first; trimmed ones are gone.
select *
  from frame
 where partition_key = :partition_key
   and execution_id = :execution_id
   and attempt_index = :attempt_index
   and frame_id >= :from_id
   and frame_id <= :to_id
   and frame_number > :hidden_through
   and (mode <> 'best_effort' or :best_effort)
 order by frame_id
 limit :limit;

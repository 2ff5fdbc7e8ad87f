-- How many signals are kept for waits to come, and how large they are together.
select count(*) as signals, coalesce(sum(length(payload)), 0) as bytes
  from signal
 where partition_key = :partition_key
   and execution_id = :execution_id
   and suspension_id is null;

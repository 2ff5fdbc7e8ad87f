-- The open waitpoints of one execution after a given one, by id.
select *
  from waitpoint
 where partition_key = :partition_key
   and execution_id = :execution_id
   and waitpoint_id > :after
   and state <> 'closed'
 order by waitpoint_id
 limit :limit;

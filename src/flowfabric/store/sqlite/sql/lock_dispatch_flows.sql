-- Flows that have endings to tell dependents about, starting from some partition and
-- coming round to it again.
select f.*
  from (select distinct partition_key, flow_id
          from completion_dispatch
         order by partition_key < :start, partition_key, flow_id
         limit min(:limit, :candidates)) as few
 cross join flow as f on f.partition_key = few.partition_key and f.flow_id = few.flow_id
 order by f.partition_key, f.flow_id;

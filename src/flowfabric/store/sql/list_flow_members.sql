-- Members of a flow, in ascending order.
select m.partition_key, m.execution_id, m.public_state, m.lifecycle_phase, m.blocking_reason,
       (select e.execution_kind
          from execution e
         where e.partition_key = m.partition_key
           and e.execution_id = m.execution_id) as execution_kind
  from flow_member m
 where m.flow_id = :flow_id
   and m.execution_id >= :start
 order by m.execution_id
 limit :limit;

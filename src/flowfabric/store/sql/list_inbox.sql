-- What the longest suspended executions wait for; the limit counts executions, of which one
-- without open waitpoints has a row of its own.
select s.partition_key, s.execution_id, s.suspension_id, e.own_id, r.execution_kind, r.lane_id,
       w.waitpoint_id, w.waitpoint_key, w.required_signal_names, s.created_at_ms as suspended_at_ms,
       s.timeout_at_ms
  from (select open.partition_key, open.execution_id, open.suspension_id, open.created_at_ms,
               open.timeout_at_ms
          from suspension as open
         where open.closed_at_ms is null
           and (open.created_at_ms, open.execution_id) > (:after_ms, :after_id)
           and (cast(:namespace as text) is null or exists (
                select 1
                  from execution x
                  join route r on r.route_id = x.route_id
                 where x.partition_key = open.partition_key
                   and x.execution_id = open.execution_id
                   and r.namespace = :namespace))
         order by open.created_at_ms, open.execution_id
         limit :limit) as s
  join execution e on e.partition_key = s.partition_key and e.execution_id = s.execution_id
  join route r on r.route_id = e.route_id
  left join waitpoint w
    on w.partition_key = s.partition_key
   and w.execution_id = s.execution_id
   and w.suspension_id = s.suspension_id
   and w.state <> 'closed'
 order by s.created_at_ms, s.execution_id, w.ordinal;

-- What earlier runs of an execution have left for the next: a row for each finished step, and for
-- its last suspension a row for each signal that brought it forward, or one without when there
-- is none.
select t.*, t.step_key as step,
       s.*, s.suspension_id as suspension,
       g.*, g.signal_id as signal
  from (
    select *
      from step
     where partition_key = :partition_key and execution_id = :execution_id
  ) as t
  full join (
    (select *
       from suspension
      where partition_key = :partition_key and execution_id = :execution_id
      order by sequence desc
      limit 1) as s
    left join lateral (
        select *
          from signal
         where signal.partition_key = s.partition_key
           and signal.execution_id = s.execution_id
           and signal.suspension_id = s.suspension_id
           and signal.satisfier
    ) as g on true
  ) on false
 order by g.sequence;

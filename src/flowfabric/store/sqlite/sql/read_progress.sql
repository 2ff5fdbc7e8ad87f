-- What earlier runs of an execution have left for the next: a row for each finished step, and for
-- its last suspension a row for each signal that brought it forward, or one without when there
-- is none.
--
-- A key that is null finds nothing, at once: so that each row is of one kind.
select t.*, t.step_key as step,
       s.*, s.suspension_id as suspension,
       g.*, g.signal_id as signal
  from (select 1 as of_steps union all select 0) as part
  left join step as t
    on t.partition_key = case part.of_steps when 1 then cast(:partition_key as integer) end
   and t.execution_id = :execution_id
  left join suspension as s
    on s.partition_key = case part.of_steps when 0 then cast(:partition_key as integer) end
   and s.execution_id = :execution_id
   and s.suspension_id = (
        select x.suspension_id
          from suspension as x
         where x.partition_key = :partition_key
           and x.execution_id = :execution_id
         order by x.sequence desc
         limit 1)
  left join signal as g
    on g.partition_key = s.partition_key
   and g.execution_id = s.execution_id
   and g.suspension_id = s.suspension_id
   and g.satisfier
 where t.step_key is not null
    or s.suspension_id is not null
 order by g.sequence;

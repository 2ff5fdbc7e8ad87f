-- Store finished steps of executions whose lease is live; return which those are, and the time.
--
-- Stands in for `core.steps.decide_record` in the sure case: the lease is live. All others
-- are left to the caller. A step that is stored already stays as it is: the same report
-- came twice. Only what it lacks is added: where it came in the order, or that it was
-- given up.
insert into step (
    partition_key, execution_id, step_key, after_key, kind, line, name, digest, number,
    parallel, asked_after, position, result, failure, wake_at_ms, duration_ms,
    attempt_index, recorded_at_ms)
select e.partition_key, e.execution_id, g.value ->> 'step_keys', g.value ->> 'after_keys',
       g.value ->> 'kinds', g.value ->> 'lines', g.value ->> 'names', g.value ->> 'digests',
       g.value ->> 'numbers', g.value ->> 'parallels', g.value ->> 'asked_afters',
       g.value ->> 'positions', unhex(g.value ->> 'results'),
       unhex(g.value ->> 'failures'), :clock + (g.value ->> 'sleeps_ms'),
       g.value ->> 'durations_ms',
       e.current_attempt_index, :clock
  from json_each(:rows) as g
 cross join live as e
    on e.partition_key = g.value ->> 'partition_keys'
   and e.execution_id = g.value ->> 'execution_ids'
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = g.value ->> 'lease_ids'
   and e.lease_expires_at_ms > :clock
    on conflict (partition_key, execution_id, step_key) do update
          set failure = coalesce(step.failure, excluded.failure),
              position = coalesce(step.position, excluded.position)
        where step.failure is null and excluded.failure is not null
           or step.position is null and excluded.position is not null;
-- next
select g.key as position, :clock as now_ms
  from json_each(:rows) as g
 cross join live as e
    on e.partition_key = g.value ->> 'partition_keys'
   and e.execution_id = g.value ->> 'execution_ids'
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = g.value ->> 'lease_ids'
   and e.lease_expires_at_ms > :clock;

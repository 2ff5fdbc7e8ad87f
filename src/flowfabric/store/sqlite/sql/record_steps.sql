-- Store finished steps of executions whose lease is live; return which those are, and when each
-- was first stored.
--
-- Stands in for `core.steps.decide_record` in the sure case: the lease is live. All others
-- are left to the caller. A step that is stored already stays as it is: the same report
-- came twice. Only what it lacks is added: where it came in the order, or that it was
-- given up.
insert into step (
    partition_key, execution_id, step_key, after_key, kind, line, name, digest, number,
    parallel, asked_after, position, result, failure, wake_at_ms, duration_ms,
    attempt_index, recorded_at_ms)
select e.partition_key, e.execution_id, given('step_keys', g.key), given('after_keys', g.key),
       given('kinds', g.key), given('lines', g.key), given('names', g.key), given('digests', g.key),
       given('numbers', g.key), given('parallels', g.key), given('asked_afters', g.key),
       given('positions', g.key), given('results', g.key),
       given('failures', g.key), :clock + (given('sleeps_ms', g.key)),
       given('durations_ms', g.key),
       e.current_attempt_index, :clock
  from json_each(:execution_ids) as g
 cross join execution as x
    on x.partition_key = given('partition_keys', g.key)
   and x.execution_id = g.value
 cross join live as e on e.execution_rowid = x.execution_rowid
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = given('lease_ids', g.key)
   and e.lease_expires_at_ms > :clock
    on conflict (partition_key, execution_id, step_key) do update
          set failure = coalesce(step.failure, excluded.failure),
              position = coalesce(step.position, excluded.position)
        where step.failure is null and excluded.failure is not null
           or step.position is null and excluded.position is not null;
-- next
select g.key as position, s.recorded_at_ms as at_ms
  from json_each(:execution_ids) as g
 cross join execution as x
    on x.partition_key = given('partition_keys', g.key)
   and x.execution_id = g.value
 cross join live as e on e.execution_rowid = x.execution_rowid
 cross join step as s
    on s.partition_key = e.partition_key
   and s.execution_id = e.execution_id
   and s.step_key = given('step_keys', g.key)
 where e.lifecycle_phase = 'active'
   and e.ownership_state = 'leased'
   and e.lease_id = given('lease_ids', g.key)
   and e.lease_expires_at_ms > :clock;

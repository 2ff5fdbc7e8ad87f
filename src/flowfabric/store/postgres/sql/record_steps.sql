-- Store finished steps of executions whose lease is live; return which those are, and when each
-- was first stored.
--
-- One round trip stands in for `core.steps.decide_record` in the sure case: the lease is
-- live. All others are left to the caller. A step that is stored already stays as it is: the
-- same report came twice. Only what it lacks is added: where it came in the order, or that
-- it was given up. If the first report was still under way when this one began, its step
-- cannot be seen here, and is left to the caller as well.
with given as materialized (
    select *
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :lease_ids::uuid[],
          :step_keys::text[], :after_keys::text[], :kinds::text[], :lines::text[],
          :names::text[], :digests::text[], :numbers::int[], :parallels::boolean[],
          :asked_afters::int[], :positions::int[], :results::bytea[], :failures::bytea[], :sleeps_ms::bigint[],
          :durations_ms::bigint[]
      ) with ordinality as g (
          partition_key, execution_id, lease_id, step_key, after_key, kind, line, name, digest,
          number, parallel, asked_after, position, result, failure, sleep_ms, duration_ms, place)
), locked as materialized (
    -- Shared: several steps of one execution may be stored at once, but the lease may
    -- not be taken away before they are.
    select g.*, coalesce(e.current_attempt_index, 0) as attempt_index, e.lease_expires_at_ms
      from given g
      join live e on e.partition_key = g.partition_key and e.execution_id = g.execution_id
     -- By key and lease alone, as in `complete_leased`.
     where e.lease_id = g.lease_id
     order by e.partition_key, e.execution_id
       for share of e
), clock as materialized (
    -- Reading `locked` first: the time of a decision is taken after its locks.
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
      from (select count(*) from locked) as after_locking
), held as materialized (
    select locked.*, clock.now_ms
      from locked, clock
     where locked.lease_expires_at_ms > clock.now_ms
), written as (
    insert into step (
        partition_key, execution_id, step_key, after_key, kind, line, name, digest, number,
        parallel, asked_after, position, result, failure, wake_at_ms, duration_ms,
        attempt_index, recorded_at_ms)
    select partition_key, execution_id, step_key, after_key, kind, line, name, digest, number,
           parallel, asked_after, position, result, failure, now_ms + sleep_ms, duration_ms,
           attempt_index, now_ms
      from held
        on conflict (partition_key, execution_id, step_key) do nothing
    returning partition_key, execution_id, step_key
), completed as (
    -- Not as part of the insert: a key that comes twice would be an error there.
    update step s
       set failure = coalesce(s.failure, h.failure),
           position = coalesce(s.position, h.position)
      from held h
     where (h.partition_key, h.execution_id, h.step_key) not in (table written)
       and s.partition_key = h.partition_key
       and s.execution_id = h.execution_id
       and s.step_key = h.step_key
       and (s.failure is null and h.failure is not null
            or s.position is null and h.position is not null)
)
select place - 1 as position, now_ms as at_ms
  from held
 where (partition_key, execution_id, step_key) in (table written)
union all
select h.place - 1, s.recorded_at_ms
  from held h
  join step s on s.partition_key = h.partition_key
             and s.execution_id = h.execution_id
             and s.step_key = h.step_key
 where (h.partition_key, h.execution_id, h.step_key) not in (table written);

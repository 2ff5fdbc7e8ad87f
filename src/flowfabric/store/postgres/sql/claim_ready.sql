-- Leases on the best ready executions a worker can serve, at most `limit`.
--
-- Routes first, rows second: each route's best rows come straight off its queue, those that wait
-- and those whose lease was lost, so rows this worker cannot run cost nothing. Skip locked: two
-- workers asking at once get different rows instead of queueing behind each other.
--
-- One round trip stands in for `core.leases.grant_lease`: an interrupted attempt is
-- resumed, a lost lease is reclaimed with a new attempt, all else starts one.
--
-- `uuids` holds an id for each of the rows, of its lease and of an attempt that begins: the server may
-- have to open a file for each random number it makes itself.
with clock as (
    select coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
               as now_ms
), candidate as materialized (
    select best.*, asked.*, row_number() over () as place, (select now_ms from clock) as now_ms,
           case lifecycle_phase when 'active' then replace(ownership_state::text, '_reclaimable', '')
           end as reclaim_reason,
           case when lifecycle_phase = 'active' then 'reclaimed'
                when attempt_state = 'attempt_interrupted' then 'resumed'
                else 'fresh'
           end as kind,
           case when lifecycle_phase = 'active' then 'reclaim'
                when attempt_state = 'attempt_interrupted' then (
                    select attempt_type
                      from attempt
                     where attempt.partition_key = best.partition_key
                       and attempt.execution_id = best.execution_id
                       and attempt.attempt_index = best.previous_index)
                when attempt_state = 'pending_retry_attempt' then 'retry'
                when attempt_state = 'pending_replay_attempt' then 'replay'
                else 'initial'
           end as attempt_type
      from (
        (select best.*, route.namespace, route.lane_id, route.execution_kind
          from (
            -- Found by what the worker serves: how many other kinds there are costs nothing.
            select * from route
             where execution_kind = any(:kinds::text[]) and lane_id = any(:lanes::text[])
               and not gated
            union all
            select * from route
             where :kinds::text[] is null and lane_id = any(:lanes::text[]) and not gated
          ) as route
          join lane using (lane_id)
         cross join lateral (
            select *
              from (
                select e.ctid as row_version, e.partition_key, e.execution_id, e.priority,
                       e.created_at_ms, e.lifecycle_phase, e.ownership_state, e.attempt_state,
                       e.pending_retry_reason, e.pending_replay_reason,
                       e.pending_replay_requested_by, e.pending_previous_attempt_index,
                       coalesce(e.current_attempt_index, 0) as previous_index,
                       e.lease_expired_at_ms
                  from live e
                 where e.route_id = route.route_id
                   and e.ready
                   and e.public_state = 'waiting'
                 order by e.priority desc, e.created_at_ms, e.execution_id
                 limit :limit::bigint
                   for update skip locked
              ) as waiting
            union all
            select *
              from (
                select e.ctid as row_version, e.partition_key, e.execution_id, e.priority,
                       e.created_at_ms, e.lifecycle_phase, e.ownership_state, e.attempt_state,
                       e.pending_retry_reason, e.pending_replay_reason,
                       e.pending_replay_requested_by, e.pending_previous_attempt_index,
                       coalesce(e.current_attempt_index, 0) as previous_index,
                       e.lease_expired_at_ms
                  from live e
                 where e.route_id = route.route_id
                   and e.ready
                   and e.public_state = 'active'
                 order by e.priority desc, e.created_at_ms, e.execution_id
                 limit :limit::bigint
                   for update skip locked
              ) as lost
         ) best
         where (:namespace::text is null or route.namespace = :namespace)
           and route.required_capabilities <@ :capabilities::text[]
           and lane.state in ('active', 'draining')
         order by best.priority desc, best.created_at_ms, best.execution_id
         limit :limit::bigint)
-- limits
        union all
        -- Of routes under limits, what fits into what `core.gates.allot` has given each of them.
        select best.row_version, best.partition_key, best.execution_id, best.priority,
               best.created_at_ms, best.lifecycle_phase, best.ownership_state, best.attempt_state,
               best.pending_retry_reason, best.pending_replay_reason,
               best.pending_replay_requested_by, best.pending_previous_attempt_index,
               best.previous_index, best.lease_expired_at_ms, route.namespace, route.lane_id,
               route.execution_kind
          from jsonb_to_recordset(:allowed::jsonb)
                   as given (route_id integer, slots bigint, starts bigint)
          join route using (route_id)
         cross join lateral (
            select *
              from (
                select *,
                       sum((lifecycle_phase = 'active'
                            or attempt_state is distinct from 'attempt_interrupted')::int)
                           over (order by priority desc, created_at_ms, execution_id) as starting
                  from (
                    select *
                      from (
                        select e.ctid as row_version, e.partition_key, e.execution_id, e.priority,
                               e.created_at_ms, e.lifecycle_phase, e.ownership_state,
                               e.attempt_state, e.pending_retry_reason, e.pending_replay_reason,
                               e.pending_replay_requested_by, e.pending_previous_attempt_index,
                               coalesce(e.current_attempt_index, 0) as previous_index,
                               e.lease_expired_at_ms
                          from live e
                         where e.route_id = given.route_id
                           and e.ready
                           and e.public_state = 'waiting'
                         order by e.priority desc, e.created_at_ms, e.execution_id
                         limit given.slots
                           for update skip locked
                      ) as waiting
                     -- Where fewer may start, those that resume come from a queue of their own.
                     where given.starts >= given.slots
                        or attempt_state is distinct from 'attempt_interrupted'
                    union all
                    select *
                      from (
                        select e.ctid as row_version, e.partition_key, e.execution_id, e.priority,
                               e.created_at_ms, e.lifecycle_phase, e.ownership_state,
                               e.attempt_state, e.pending_retry_reason, e.pending_replay_reason,
                               e.pending_replay_requested_by, e.pending_previous_attempt_index,
                               coalesce(e.current_attempt_index, 0) as previous_index,
                               e.lease_expired_at_ms
                          from live e
                         where given.starts < given.slots
                           and e.route_id = given.route_id
                           and e.ready
                           and e.public_state = 'waiting'
                           and e.attempt_state = 'attempt_interrupted'
                         order by e.priority desc, e.created_at_ms, e.execution_id
                         limit given.slots
                           for update skip locked
                      ) as resuming
                    union all
                    select *
                      from (
                        select e.ctid as row_version, e.partition_key, e.execution_id, e.priority,
                               e.created_at_ms, e.lifecycle_phase, e.ownership_state,
                               e.attempt_state, e.pending_retry_reason, e.pending_replay_reason,
                               e.pending_replay_requested_by, e.pending_previous_attempt_index,
                               coalesce(e.current_attempt_index, 0) as previous_index,
                               e.lease_expired_at_ms
                          from live e
                         where e.route_id = given.route_id
                           and e.ready
                           and e.public_state = 'active'
                         order by e.priority desc, e.created_at_ms, e.execution_id
                         limit given.slots
                           for update skip locked
                      ) as lost
                  ) as heads
              ) as ranked
             where ranked.starting <= given.starts
                or (ranked.lifecycle_phase <> 'active'
                    and ranked.attempt_state = 'attempt_interrupted')
             order by priority desc, created_at_ms, execution_id
             limit given.slots
         ) as best
-- end of limits
      ) as best
     cross join lateral (
        select x.payload, x.payload_encoding, x.attempt_timeout_ms
          from execution x
         where x.partition_key = best.partition_key
           and x.execution_id = best.execution_id
         limit 1) as asked
), leased as (
    update live e
       set lifecycle_phase = 'active',
           ownership_state = 'leased',
           eligibility_state = null,
           blocking_reason = null,
           blocking_detail = null,
           attempt_state = null,
           public_state = 'active',
           ready = false,
           lease_id = encode(substr(:uuids::bytea, 16 * c.place::int - 15, 16), 'hex')::uuid,
           lease_epoch = coalesce(e.lease_epoch, 0) + 1,
           worker_id = :worker_id,
           worker_instance_id = :worker_instance_id,
           lease_acquired_at_ms = c.now_ms,
           lease_expires_at_ms = c.now_ms + :lease_ttl_ms::bigint,
           lease_last_renewed_at_ms = case when :renews_first::boolean and c.kind <> 'fresh'
                                            and e.worker_deaths > 0 then c.now_ms - 1 end,
           lease_expired_at_ms = null,
           lease_revoked_at_ms = null,
           lease_revoke_reason = null,
           current_attempt_id = case when c.kind = 'resumed' then e.current_attempt_id end,
           current_attempt_index = case when c.kind = 'resumed' then e.current_attempt_index
               else nullif(coalesce(e.total_attempt_count, e.lease_epoch), 0) end,
           total_attempt_count = nullif(
               coalesce(e.total_attempt_count, e.lease_epoch, 0) + (c.kind <> 'resumed')::int,
               coalesce(e.lease_epoch, 0) + 1),
           lease_reclaim_count = nullif(
               greatest(e.lease_reclaim_count, 0) + (c.kind = 'reclaimed')::int, 0),
           worker_deaths = case when c.kind <> 'fresh' then e.worker_deaths end,
           attempt_deadline_ms = c.now_ms + nullif(
               case when c.kind = 'resumed' then e.attempt_time_left_ms
                    else c.attempt_timeout_ms end, 0),
           attempt_time_left_ms = null,
           started_at_ms = coalesce(e.started_at_ms, e.lease_acquired_at_ms),
           pending_retry_reason = null,
           pending_replay_reason = null,
           pending_replay_requested_by = null,
           pending_previous_attempt_index = null,
           last_transition_at_ms = case when c.kind = 'reclaimed' then coalesce(
               e.last_transition_at_ms, e.lease_acquired_at_ms, e.created_at_ms) end,
           last_mutation_at_ms = case when c.kind = 'reclaimed' then c.now_ms end
      from candidate c
     -- The row is locked, so its version cannot change under us: no need to look it up again.
     where e.ctid = c.row_version
       -- Another worker's whole turn may have passed since this statement began. Its attempt
       -- is invisible here and could not be continued; the next claim sees it.
       and c.attempt_type is not null
    returning e.partition_key, e.execution_id, e.route_id, c.namespace, e.instance_tag, e.flow_id, c.lane_id,
              c.execution_kind, e.priority, coalesce(e.input, c.payload) as payload,
              case when e.input is null then c.payload_encoding else e.input_encoding end
                  as payload_encoding,
              coalesce(e.retry_count, 0) as retry_count, e.worker_deaths, e.created_at_ms, e.deadline_at_ms,
              e.attempt_deadline_ms, e.lease_id, e.lease_epoch,
              coalesce(e.current_attempt_id, e.lease_id) as current_attempt_id,
              coalesce(e.current_attempt_index, 0) as current_attempt_index, c.place, c.kind,
              c.reclaim_reason, c.lease_expired_at_ms as lost_at_ms,
              c.attempt_type, c.pending_retry_reason, c.pending_replay_reason,
              c.pending_replay_requested_by, c.pending_previous_attempt_index, c.previous_index,
              c.now_ms
), started as (
    -- All but the first attempt under its first lease, which follows from the execution.
    insert into attempt (
        partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
        created_at_ms, started_at_ms, lease_id, lease_epoch, worker_id, worker_instance_id,
        retry_reason, previous_attempt_index, replay_reason, replay_requested_by,
        replayed_from_attempt_index, reclaim_reason)
    select partition_key, execution_id, current_attempt_index, current_attempt_id, attempt_type,
           'started', now_ms, now_ms, lease_id,
           lease_epoch, :worker_id, :worker_instance_id,
           case when attempt_type = 'retry' then pending_retry_reason end,
           case when attempt_type = 'reclaim' then previous_index
                when attempt_type = 'retry' then pending_previous_attempt_index
           end,
           case when attempt_type = 'replay' then pending_replay_reason end,
           case when attempt_type = 'replay' then pending_replay_requested_by end,
           case when attempt_type = 'replay' then pending_previous_attempt_index end,
           reclaim_reason
      from leased
     where kind <> 'resumed'
       and lease_epoch > 1
), continued as (
    update attempt a
       set attempt_state = case when l.kind = 'resumed' then 'started'
                                else 'interrupted_reclaimed' end,
           ended_at_ms = case when l.kind = 'reclaimed' then coalesce(l.lost_at_ms, l.now_ms)
                              else a.ended_at_ms end,
           failure_reason = coalesce(l.reclaim_reason, a.failure_reason),
           resumed_at_ms = case when l.kind = 'resumed' then l.now_ms
                                else a.resumed_at_ms end,
           suspended_at_ms = case when l.kind = 'resumed' then null else a.suspended_at_ms end,
           suspension_id = case when l.kind = 'resumed' then null else a.suspension_id end,
           lease_id = case when l.kind = 'resumed' then l.lease_id else a.lease_id end,
           lease_epoch = case when l.kind = 'resumed' then l.lease_epoch else a.lease_epoch end,
           worker_id = case when l.kind = 'resumed' then :worker_id else a.worker_id end,
           worker_instance_id = case when l.kind = 'resumed' then :worker_instance_id
                                     else a.worker_instance_id end
      from leased l
     -- Looked up one by one: as a plain join this may be planned as a walk over the table.
     cross join lateral (
        select x.ctid as row_version
          from attempt x
         where x.partition_key = l.partition_key
           and x.execution_id = l.execution_id
           and x.attempt_index = l.previous_index
         limit 1) as former
     where l.kind <> 'fresh'
       and a.ctid = former.row_version
), told as (
    insert into event (
        occurred_at_ms, category, event_type, namespace, instance_tag, worker_instance_id, reason,
        partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index)
    select now_ms, 'lease',
           case when kind = 'reclaimed' then 'reclaimed' else 'acquired' end,
           namespace, instance_tag, :worker_instance_id,
           case when kind = 'resumed' then 'claim_resumed' else reclaim_reason end,
           array_agg(partition_key), array_agg(execution_id), array_agg(flow_id),
           array_agg(lease_id), array_agg(lease_epoch), array_agg(current_attempt_index)
      from leased
     group by now_ms, kind, reclaim_reason, namespace, instance_tag
)
select payload, partition_key, execution_id::text as execution_id, lease_id::text as lease_id,
       lane_id, now_ms + :lease_ttl_ms::bigint as lease_expires_at_ms, namespace, execution_kind,
       priority, created_at_ms, route_id, payload_encoding, deadline_at_ms, attempt_deadline_ms,
       flow_id::text as flow_id, kind, lease_epoch, current_attempt_index as attempt_index,
       current_attempt_id::text as attempt_id, attempt_type, retry_count,
       worker_deaths,
       -- What `read_progress` tells, if there is little of it. A row that has changed since the
       -- snapshot of this statement is not leased, so nothing that came with a change is missing.
       case when (kind <> 'fresh' or current_attempt_index > 0)
             and (select count(*) <= 100 and coalesce(sum(size), 0) <= 16384
                    from (
                      (select coalesce(octet_length(result), 0)
                                  + coalesce(octet_length(failure), 0) as size
                         from step
                        where partition_key = leased.partition_key
                          and execution_id = leased.execution_id
                        limit 101)
                      union all
                      (select octet_length(payload)
                         from signal
                        where partition_key = leased.partition_key
                          and execution_id = leased.execution_id
                        limit 101)
                    ) as each)
            then json_build_object(
                'steps', (
                    select coalesce(json_agg(s), '[]')
                      from (
                        select partition_key,
                               format('{fp:%s}:%s', partition_key, execution_id) as execution_id,
                               step_key, after_key, kind, line, name, digest, number, parallel,
                               asked_after, position, wake_at_ms, duration_ms, attempt_index,
                               recorded_at_ms,
                               translate(encode(result, 'base64'), e'\n', '') as result,
                               translate(encode(failure, 'base64'), e'\n', '') as failure
                          from step
                         where partition_key = leased.partition_key
                           and execution_id = leased.execution_id
                      ) as s),
                'pause', (
                    select to_json(s)
                      from (
                        select suspension_id, attempt_index, waitpoint_id, reason_code,
                               timeout_at_ms, timeout_behavior, continuation_metadata_pointer,
                               created_at_ms, satisfied_at_ms, closed_at_ms, close_reason,
                               (select coalesce(json_agg(s), '[]')
                                  from (
                                    select signal_id, signal_name, signal_category, waitpoint_key,
                                           source_type, source_identity, correlation_id,
                                           accepted_at_ms, payload_encoding, matched,
                                           observed_effect as effect,
                                           translate(encode(payload, 'base64'), e'\n', '')
                                               as payload
                                      from signal
                                     where partition_key = pause.partition_key
                                       and execution_id = pause.execution_id
                                       and suspension_id = pause.suspension_id
                                       and satisfier
                                     order by sequence
                                  ) as s) as signals
                          from suspension as pause
                         where partition_key = leased.partition_key
                           and execution_id = leased.execution_id
                         order by sequence desc
                         limit 1
                      ) as s))::text
       end as progress
  from leased
 order by place;

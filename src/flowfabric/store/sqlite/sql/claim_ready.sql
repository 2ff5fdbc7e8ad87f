-- Leases on the best ready executions a worker can serve, at most `limit`.
--
-- Routes first, rows second: each route's best rows come straight off its queue, those that wait
-- and those whose lease was lost, so rows this worker cannot run cost nothing. `claiming` is a
-- temporary table of the writer's connection that holds the chosen rows as they were.
--
-- Together these stand in for `core.leases.grant_lease`: an interrupted attempt is
-- resumed, a lost lease is reclaimed with a new attempt, all else starts one.
--
-- `uuids` holds an id for each of the rows, of its lease and of an attempt that begins.
delete from temp.claiming;
-- next
insert into temp.claiming (
    execution_rowid, partition_key, execution_id, kind, reclaim_reason, attempt_type,
    pending_retry_reason, pending_replay_reason, pending_replay_requested_by,
    pending_previous_attempt_index, previous_index, namespace, lane_id, execution_kind,
    attempt_timeout_ms)
select e.rowid, e.partition_key, e.execution_id,
       case when e.lifecycle_phase = 'active' then 'reclaimed'
            when e.attempt_state = 'attempt_interrupted' then 'resumed'
            else 'fresh'
       end,
       case e.lifecycle_phase when 'active' then replace(e.ownership_state, '_reclaimable', '') end,
       case when e.lifecycle_phase = 'active' then 'reclaim'
            when e.attempt_state = 'attempt_interrupted' then (
                select attempt_type
                  from attempt
                 where attempt.partition_key = e.partition_key
                   and attempt.execution_id = e.execution_id
                   and attempt.attempt_index = e.current_attempt_index)
            when e.attempt_state = 'pending_retry_attempt' then 'retry'
            when e.attempt_state = 'pending_replay_attempt' then 'replay'
            else 'initial'
       end,
       e.pending_retry_reason, e.pending_replay_reason,
       e.pending_replay_requested_by, e.pending_previous_attempt_index, e.current_attempt_index,
       route.namespace, route.lane_id, route.execution_kind, asked.attempt_timeout_ms
  from (
    -- Found by what the worker serves: how many other kinds there are costs nothing.
    select route.* from json_each(:kinds) as kind
     cross join json_each(:lanes) as served
     cross join route
        on route.execution_kind = kind.value and route.lane_id = served.value and route.gated = 0
    union all
    select route.* from json_each(:lanes) as served
     cross join route on route.lane_id = served.value and route.gated = 0
     where :kinds is null
  ) as route
 cross join lane on lane.lane_id = route.lane_id and lane.state in ('active', 'draining')
 cross join live as e on e.rowid in (
    select rowid
      from (
        select x.rowid
          from live as x
         where x.route_id = route.route_id
           and x.ready
           and x.public_state = 'waiting'
         order by x.priority desc, x.created_at_ms, x.execution_id
         limit :limit)
    union all
    select rowid
      from (
        select x.rowid
          from live as x
         where x.route_id = route.route_id
           and x.ready
           and x.public_state = 'active'
         order by x.priority desc, x.created_at_ms, x.execution_id
         limit :limit))
 cross join execution as asked
    on asked.partition_key = e.partition_key and asked.execution_id = e.execution_id
 where (:namespace is null or route.namespace = :namespace)
   and not exists (
        select 1 from json_each(route.required_capabilities) as need
         where need.value not in (select value from json_each(:capabilities)))
 order by e.priority desc, e.created_at_ms, e.execution_id
 limit :limit;
-- next
-- Of routes under limits, what fits into what `core.gates.allot` has given each of them.
insert into temp.claiming (
    execution_rowid, partition_key, execution_id, kind, reclaim_reason, attempt_type,
    pending_retry_reason, pending_replay_reason, pending_replay_requested_by,
    pending_previous_attempt_index, previous_index, namespace, lane_id, execution_kind,
    attempt_timeout_ms)
select e.rowid, e.partition_key, e.execution_id,
       case when e.lifecycle_phase = 'active' then 'reclaimed'
            when e.attempt_state = 'attempt_interrupted' then 'resumed'
            else 'fresh'
       end,
       case e.lifecycle_phase when 'active' then replace(e.ownership_state, '_reclaimable', '') end,
       case when e.lifecycle_phase = 'active' then 'reclaim'
            when e.attempt_state = 'attempt_interrupted' then (
                select attempt_type
                  from attempt
                 where attempt.partition_key = e.partition_key
                   and attempt.execution_id = e.execution_id
                   and attempt.attempt_index = e.current_attempt_index)
            when e.attempt_state = 'pending_retry_attempt' then 'retry'
            when e.attempt_state = 'pending_replay_attempt' then 'replay'
            else 'initial'
       end,
       e.pending_retry_reason, e.pending_replay_reason,
       e.pending_replay_requested_by, e.pending_previous_attempt_index, e.current_attempt_index,
       route.namespace, route.lane_id, route.execution_kind, asked.attempt_timeout_ms
  from json_each(:allowed) as given
 cross join route on route.route_id = given.value ->> 'route_id'
 cross join live as e on e.rowid in (
    select rowid
      from (
        select rowid,
               row_number() over (order by priority desc, created_at_ms, execution_id) as place
          from (
            select *,
                   sum(not resumes) over (order by priority desc, created_at_ms, execution_id)
                       as starting
              from (
                select * from (
                    select x.rowid, x.priority, x.created_at_ms, x.execution_id,
                           x.attempt_state = 'attempt_interrupted' as resumes
                      from live as x
                     where x.route_id = given.value ->> 'route_id'
                       and x.ready
                       and x.public_state = 'waiting'
                     order by x.priority desc, x.created_at_ms, x.execution_id
                     limit (select max(value ->> 'slots') from json_each(:allowed)))
                 -- Where fewer may start, those that resume come from a queue of their own.
                 where not resumes or given.value ->> 'starts' >= given.value ->> 'slots'
                union all
                select * from (
                    select x.rowid, x.priority, x.created_at_ms, x.execution_id, 1 as resumes
                      from live as x
                     where given.value ->> 'starts' < given.value ->> 'slots'
                       and x.route_id = given.value ->> 'route_id'
                       and x.ready
                       and x.public_state = 'waiting'
                       and x.attempt_state = 'attempt_interrupted'
                     order by x.priority desc, x.created_at_ms, x.execution_id
                     limit (select max(value ->> 'slots') from json_each(:allowed)))
                union all
                select * from (
                    select x.rowid, x.priority, x.created_at_ms, x.execution_id, 0 as resumes
                      from live as x
                     where x.route_id = given.value ->> 'route_id'
                       and x.ready
                       and x.public_state = 'active'
                     order by x.priority desc, x.created_at_ms, x.execution_id
                     limit (select max(value ->> 'slots') from json_each(:allowed)))))
         where resumes or starting <= given.value ->> 'starts')
     where place <= given.value ->> 'slots')
 cross join execution as asked
    on asked.partition_key = e.partition_key and asked.execution_id = e.execution_id;
-- next
update live
   set lifecycle_phase = 'active',
       ownership_state = 'leased',
       eligibility_state = 'not_applicable',
       blocking_reason = 'none',
       blocking_detail = '',
       attempt_state = 'running_attempt',
       public_state = 'active',
       ready = 0,
       lease_id = uuid_at(:uuids, c.place - 1),
       lease_epoch = lease_epoch + 1,
       worker_id = :worker_id,
       worker_instance_id = :worker_instance_id,
       lease_acquired_at_ms = :clock,
       lease_expires_at_ms = :clock + :lease_ttl_ms,
       lease_last_renewed_at_ms = :clock,
       lease_expired_at_ms = null,
       lease_revoked_at_ms = null,
       lease_revoke_reason = null,
       current_attempt_id = case when c.kind = 'resumed' then live.current_attempt_id
                                 else uuid_at(:uuids, c.place - 1) end,
       current_attempt_index = case when c.kind = 'resumed' then current_attempt_index
                                    else total_attempt_count end,
       total_attempt_count = total_attempt_count + (c.kind <> 'resumed'),
       lease_reclaim_count = max(lease_reclaim_count, 0) + (c.kind = 'reclaimed'),
       worker_deaths = case when c.kind = 'reclaimed' then worker_deaths else 0 end,
       attempt_deadline_ms = :clock + nullif(
           case when c.kind = 'resumed' then attempt_time_left_ms else c.attempt_timeout_ms end, 0),
       attempt_time_left_ms = null,
       started_at_ms = coalesce(started_at_ms, :clock),
       pending_retry_reason = null,
       pending_replay_reason = null,
       pending_replay_requested_by = null,
       pending_previous_attempt_index = null,
       last_transition_at_ms = case when c.kind = 'reclaimed' then last_transition_at_ms
                                    else :clock end,
       last_mutation_at_ms = :clock
  from temp.claiming as c
 where live.rowid = c.execution_rowid
   and live.rowid in (select execution_rowid from temp.claiming);
-- next
-- All but the first attempt under its first lease, which follows from the execution.
insert into attempt (
    partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
    created_at_ms, started_at_ms, lease_id, lease_epoch, worker_id, worker_instance_id,
    retry_reason, previous_attempt_index, replay_reason, replay_requested_by,
    replayed_from_attempt_index, reclaim_reason)
select e.partition_key, e.execution_id, e.current_attempt_index, e.current_attempt_id,
       c.attempt_type, 'started', :clock, :clock, e.lease_id, e.lease_epoch, e.worker_id,
       e.worker_instance_id,
       case when c.attempt_type = 'retry' then c.pending_retry_reason end,
       case when c.attempt_type = 'reclaim' then c.previous_index
            when c.attempt_type = 'retry' then c.pending_previous_attempt_index
       end,
       case when c.attempt_type = 'replay' then c.pending_replay_reason end,
       case when c.attempt_type = 'replay' then c.pending_replay_requested_by end,
       case when c.attempt_type = 'replay' then c.pending_previous_attempt_index end,
       c.reclaim_reason
  from temp.claiming as c
 cross join live as e on e.rowid = c.execution_rowid
 where c.kind <> 'resumed'
   and e.lease_epoch > 1;
-- next
update attempt
   set attempt_state = case when c.kind = 'resumed' then 'started'
                            else 'interrupted_reclaimed' end,
       ended_at_ms = case when c.kind = 'reclaimed' then :clock else attempt.ended_at_ms end,
       failure_reason = coalesce(c.reclaim_reason, attempt.failure_reason),
       resumed_at_ms = case when c.kind = 'resumed' then :clock else attempt.resumed_at_ms end,
       suspended_at_ms = case when c.kind = 'resumed' then null else attempt.suspended_at_ms end,
       suspension_id = case when c.kind = 'resumed' then null else attempt.suspension_id end,
       lease_id = case when c.kind = 'resumed' then e.lease_id else attempt.lease_id end,
       lease_epoch = case when c.kind = 'resumed' then e.lease_epoch else attempt.lease_epoch end,
       worker_id = case when c.kind = 'resumed' then e.worker_id else attempt.worker_id end,
       worker_instance_id = case when c.kind = 'resumed' then e.worker_instance_id
                                 else attempt.worker_instance_id end
  from temp.claiming as c
 cross join live as e on e.rowid = c.execution_rowid
 where c.kind <> 'fresh'
   and attempt.partition_key = c.partition_key
   and attempt.execution_id = c.execution_id
   and attempt.attempt_index = c.previous_index
   -- The uuid first: the other way round SQLite searches by the partition alone.
   and (attempt.execution_id, attempt.partition_key, attempt.attempt_index) in (
        select execution_id, partition_key, previous_index
          from temp.claiming
         where kind <> 'fresh');
-- next
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
select 'lease', case when c.kind = 'reclaimed' then 'reclaimed' else 'acquired' end,
       e.partition_key, e.execution_id, e.flow_id, e.lease_id, e.lease_epoch,
       e.current_attempt_index, e.worker_instance_id,
       case when c.kind = 'resumed' then 'claim_resumed' else c.reclaim_reason end,
       c.namespace, e.instance_tag, :clock
  from temp.claiming as c
 cross join live as e on e.rowid = c.execution_rowid;
-- next
select e.partition_key, e.execution_id, c.kind, e.lease_id, e.lease_epoch, c.lane_id,
       e.current_attempt_index as attempt_index, e.current_attempt_id as attempt_id,
       e.lease_expires_at_ms, c.namespace, c.execution_kind, e.priority,
       coalesce(e.input, asked.payload) as payload,
       case when e.input is null then asked.payload_encoding else e.input_encoding end
           as payload_encoding,
       e.flow_id, e.retry_count, e.created_at_ms, e.deadline_at_ms, e.attempt_deadline_ms,
       c.attempt_type, e.route_id
  from temp.claiming as c
 cross join live as e on e.rowid = c.execution_rowid
 cross join execution as asked
    on asked.partition_key = e.partition_key and asked.execution_id = e.execution_id
 order by c.place;

-- Leases on the best ready executions a worker can serve, at most `limit`.
--
-- Routes first, rows second: each route's best rows come straight off its queue, those that wait
-- and those whose lease was lost, so rows this worker cannot run cost nothing. `claiming` is a
-- temporary table of the writer's connection that says which rows were chosen. What depends on how
-- they were is written before they are.
--
-- Together these stand in for `core.leases.grant_lease`: an interrupted attempt is
-- resumed, a lost lease is reclaimed with a new attempt, all else starts one.
--
-- The id of a lease, and of an attempt that begins with it, is the first of `uuids` up to its last
-- part, which is the number of the row: no other claim has the former, no other row the latter.
-- The number is decimal, so that statements find the row by it; see `complete_leased.sql`.
delete from claiming;
-- and
insert into claiming (execution_rowid, again)
select best.execution_rowid, best.again
  from (
    select e.execution_rowid, e.lease_epoch > 0 as again
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
     where (:namespace is null or route.namespace = :namespace)
       and not exists (
            select 1 from json_each(route.required_capabilities) as need
             where need.value not in (select value from json_each(:capabilities)))
     order by e.priority desc, e.created_at_ms, e.execution_id
     limit :limit) as best;
-- limits
-- and
-- Of routes under limits, what fits into what `core.gates.allot` has given each of them.
insert into claiming (execution_rowid, again)
select e.execution_rowid, e.lease_epoch > 0
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
                           x.attempt_state is 'attempt_interrupted' as resumes
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
     where place <= given.value ->> 'slots');
-- end of limits
-- and
-- Nearly all begin their first attempt, which is what a row of `claiming` says unless it is told.
insert or replace into claiming (
    place, execution_rowid, again, kind, attempt_type, reason)
select c.place, c.execution_rowid, c.again,
       case when e.lifecycle_phase = 'active' then 'reclaimed'
            when e.attempt_state = 'attempt_interrupted' then 'resumed'
            else 'fresh'
       end,
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
       case when e.lifecycle_phase = 'active'
            then replace(e.ownership_state, '_reclaimable', '')
            when e.attempt_state = 'attempt_interrupted' then 'claim_resumed'
       end
  from temp.claiming as c
 cross join live as e on e.execution_rowid = c.execution_rowid
 where c.again;
-- and
-- All but the first attempt under its first lease, which follows from the execution.
insert into attempt (
    partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
    created_at_ms, started_at_ms, lease_id, lease_epoch, worker_id, worker_instance_id,
    retry_reason, previous_attempt_index, replay_reason, replay_requested_by,
    replayed_from_attempt_index, reclaim_reason)
select e.partition_key, e.execution_id, e.total_attempt_count,
       (select uuid_head(:uuids)) || printf('%012d', c.execution_rowid), c.attempt_type,
       'started', :clock, :clock, (select uuid_head(:uuids)) || printf('%012d', c.execution_rowid),
       e.lease_epoch + 1, :worker_id, :worker_instance_id,
       case when c.attempt_type = 'retry' then e.pending_retry_reason end,
       case when c.attempt_type = 'reclaim' then e.current_attempt_index
            when c.attempt_type = 'retry' then e.pending_previous_attempt_index
       end,
       case when c.attempt_type = 'replay' then e.pending_replay_reason end,
       case when c.attempt_type = 'replay' then e.pending_replay_requested_by end,
       case when c.attempt_type = 'replay' then e.pending_previous_attempt_index end,
       case when c.kind = 'reclaimed' then c.reason end
  from temp.claiming as c
 cross join live as e on e.execution_rowid = c.execution_rowid
 where c.again
   and c.kind <> 'resumed';
-- and
update attempt
   set attempt_state = case when was.kind = 'resumed' then 'started'
                            else 'interrupted_reclaimed' end,
       ended_at_ms = case when was.kind = 'reclaimed' then coalesce(was.lease_expired_at_ms, :clock)
                          else attempt.ended_at_ms end,
       failure_reason = case when was.kind = 'reclaimed' then was.reason
                             else attempt.failure_reason end,
       resumed_at_ms = case when was.kind = 'resumed' then :clock else attempt.resumed_at_ms end,
       suspended_at_ms = case when was.kind = 'resumed' then null else attempt.suspended_at_ms end,
       suspension_id = case when was.kind = 'resumed' then null else attempt.suspension_id end,
       lease_id = case when was.kind = 'resumed'
                       then (select uuid_head(:uuids)) || printf('%012d', was.execution_rowid)
                       else attempt.lease_id end,
       lease_epoch = case when was.kind = 'resumed' then was.lease_epoch + 1
                          else attempt.lease_epoch end,
       worker_id = case when was.kind = 'resumed' then :worker_id else attempt.worker_id end,
       worker_instance_id = case when was.kind = 'resumed' then :worker_instance_id
                                 else attempt.worker_instance_id end
  from (
    select c.kind, c.reason, e.execution_rowid, e.lease_epoch, e.lease_expired_at_ms,
           e.partition_key, e.execution_id, e.current_attempt_index
      from temp.claiming as c
     cross join live as e on e.execution_rowid = c.execution_rowid
     where c.again
       and c.kind <> 'fresh'
     -- Looked for first, so that each attempt is found by its key.
     limit -1) as was
 where attempt.partition_key = was.partition_key
   and attempt.execution_id = was.execution_id
   and attempt.attempt_index = was.current_attempt_index;
-- and
-- What kind of claim it is follows from the row as it was; looking it up would cost as much again.
update live
   set lifecycle_phase = 'active',
       ownership_state = 'leased',
       eligibility_state = null,
       blocking_reason = null,
       blocking_detail = '',
       attempt_state = null,
       public_state = 'active',
       ready = 0,
       lease_id = (select uuid_head(:uuids)) || printf('%012d', execution_rowid),
       lease_epoch = lease_epoch + 1,
       worker_id = :worker_id,
       worker_instance_id = :worker_instance_id,
       lease_acquired_at_ms = :clock,
       lease_expires_at_ms = :clock + :lease_ttl_ms,
       lease_last_renewed_at_ms = case when :renews_first and worker_deaths > 0
                                        and (lifecycle_phase = 'active'
                                             or attempt_state = 'attempt_interrupted')
                                       then :clock - 1 end,
       lease_expired_at_ms = null,
       lease_revoked_at_ms = null,
       lease_revoke_reason = null,
       current_attempt_id = case when lifecycle_phase <> 'active'
                                  and attempt_state = 'attempt_interrupted'
                                 then coalesce(current_attempt_id, lease_id) end,
       current_attempt_index = case when lifecycle_phase <> 'active'
                                     and attempt_state = 'attempt_interrupted'
                                    then current_attempt_index
                                    else total_attempt_count end,
       total_attempt_count = total_attempt_count + (
           lifecycle_phase = 'active' or attempt_state is not 'attempt_interrupted'),
       lease_reclaim_count = max(lease_reclaim_count, 0) + (lifecycle_phase = 'active'),
       worker_deaths = case when lifecycle_phase = 'active'
                              or attempt_state = 'attempt_interrupted'
                            then worker_deaths else 0 end,
       attempt_deadline_ms = :clock + nullif(
           case when lifecycle_phase <> 'active' and attempt_state = 'attempt_interrupted'
                then attempt_time_left_ms else attempt_timeout_ms end, 0),
       attempt_time_left_ms = null,
       started_at_ms = coalesce(started_at_ms, lease_acquired_at_ms),
       pending_retry_reason = null,
       pending_replay_reason = null,
       pending_replay_requested_by = null,
       pending_previous_attempt_index = null,
       last_transition_at_ms = case when lifecycle_phase = 'active' then last_transition_at_ms
                                    else :clock end,
       last_mutation_at_ms = :clock
 where execution_rowid in (select execution_rowid from temp.claiming where again);
-- and
-- The same for those that nobody has had before: there is nothing to end or to keep.
update live
   set lifecycle_phase = 'active',
       ownership_state = 'leased',
       eligibility_state = null,
       blocking_reason = null,
       blocking_detail = '',
       attempt_state = null,
       public_state = 'active',
       ready = 0,
       lease_id = (select uuid_head(:uuids)) || printf('%012d', execution_rowid),
       lease_epoch = 1,
       worker_id = :worker_id,
       worker_instance_id = :worker_instance_id,
       lease_acquired_at_ms = :clock,
       lease_expires_at_ms = :clock + :lease_ttl_ms,
       current_attempt_index = 0,
       total_attempt_count = 1,
       lease_reclaim_count = 0,
       worker_deaths = 0,
       attempt_deadline_ms = :clock + nullif(attempt_timeout_ms, 0),
       last_transition_at_ms = :clock,
       last_mutation_at_ms = :clock
 where execution_rowid in (select execution_rowid from temp.claiming where not again);
-- and
insert into event (
    category, event_type, partition_key, execution_id, flow_id, lease_id, lease_epoch,
    attempt_index, worker_instance_id, reason, namespace, instance_tag, occurred_at_ms)
select 'lease', case when c.kind = 'reclaimed' then 'reclaimed' else 'acquired' end,
       e.partition_key, e.execution_id, e.flow_id, e.lease_id, e.lease_epoch,
       e.current_attempt_index, :worker_instance_id, c.reason, route.namespace, e.instance_tag,
       :clock
  from temp.claiming as c
 cross join live as e on e.execution_rowid = c.execution_rowid
 cross join route on route.route_id = e.route_id;
-- next
-- What says of most rows that they are nobody's deadline, member or later attempt is left out.
select coalesce(e.input, asked.payload) as payload,
       case when c.again or e.flow_id is not null or e.deadline_at_ms is not null
              or e.attempt_deadline_ms is not null
            then json_array(
               '', e.partition_key, e.execution_id, e.lease_id, route.lane_id, e.lease_expires_at_ms,
               route.namespace, route.execution_kind, e.priority, e.created_at_ms, e.route_id,
               case when e.input is null then asked.payload_encoding else e.input_encoding end,
               e.deadline_at_ms, e.attempt_deadline_ms, e.flow_id, c.kind, e.lease_epoch,
               e.current_attempt_index, coalesce(e.current_attempt_id, e.lease_id), c.attempt_type,
               e.retry_count, e.worker_deaths)
            else json_array(
               '', e.partition_key, e.execution_id, e.lease_id, route.lane_id, e.lease_expires_at_ms,
               route.namespace, route.execution_kind, e.priority, e.created_at_ms, e.route_id,
               case when e.input is null then asked.payload_encoding else e.input_encoding end)
       end
       as "payload partition_key execution_id lease_id lane_id lease_expires_at_ms
           namespace execution_kind priority created_at_ms route_id
           payload_encoding
           deadline_at_ms attempt_deadline_ms flow_id kind lease_epoch
           attempt_index attempt_id attempt_type
           retry_count worker_deaths"
  from temp.claiming as c
 cross join live as e on e.execution_rowid = c.execution_rowid
 cross join execution as asked on asked.execution_rowid = e.execution_rowid
 cross join route on route.route_id = e.route_id
 order by c.place;

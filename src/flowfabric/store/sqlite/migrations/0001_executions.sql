-- backward-compatible: no
--
-- Executions and what belongs to them. Uuids are text; times are milliseconds.

-- What the wall clock showed when the machine started; see `core.clock`.
create table clock (
    singleton      integer primary key default 1 check (singleton = 1),
    boot_id        text not null,
    started_at_ms  integer not null
) strict;

create table deployment (
    singleton              integer primary key default 1 check (singleton = 1),
    num_flow_partitions    integer not null check (num_flow_partitions > 0),
    num_budget_partitions  integer not null check (num_budget_partitions > 0),
    num_quota_partitions   integer not null check (num_quota_partitions > 0),
    handle_key             blob not null check (length(handle_key) = 32),
    created_at_ms          integer not null,
    -- The number of the newest event that was deleted for its age.
    events_gone_through    integer not null default 0
) strict;

insert into deployment (
    num_flow_partitions, num_budget_partitions, num_quota_partitions, handle_key, created_at_ms
) values (
    256, 32, 32,
    randomblob(32),
    cast((julianday('now') - 2440587.5) * 86400000 as integer)
);

-- The time, for statements that both databases share; here programs bring their own.
create view this_moment as
select cast((julianday('now') - 2440587.5) * 86400000 as integer) as now_ms;

create table lane (
    lane_id              text not null primary key,
    state                text not null check (state in ('active', 'paused', 'draining', 'disabled')),
    registered_at_ms     integer not null,
    registered_by        text not null,
    state_changed_at_ms  integer
) strict, without rowid;

insert into lane (lane_id, state, registered_at_ms, registered_by) values
    ('default', 'active', cast((julianday('now') - 2440587.5) * 86400000 as integer), 'deployment');

create table route (
    route_id               integer primary key,
    namespace              text not null,
    lane_id                text not null,
    execution_kind         text not null,
    required_capabilities  text not null default '[]' check (json_valid(required_capabilities)),
    -- The limits its executions were submitted under; see `gate`.
    gate_ids               text not null default '[]' check (json_valid(gate_ids)),
    -- Whether claims ask gates: those, or those of a budget over all of the route.
    gated                  integer not null default 0 check (gated in (0, 1)),
    created_at_ms          integer not null,
    retain_until_ms        integer not null,
    constraint route_key unique (namespace, lane_id, execution_kind, required_capabilities, gate_ids)
) strict;

create index route_by_kind on route (execution_kind, lane_id, gated, route_id);
create index route_retention on route (retain_until_ms);

-- An execution by phase of its life: what was asked, written once; what is going on, as long as
-- it has not ended; how it ended.
--
-- The number that an execution is given with its first row is the key of all three: those that are
-- claimed and completed together were made together, and lie together then. It is looked up by
-- partition and uuid in `execution` alone, so that neither a claim nor an end writes to that index.
--
-- Columns that claims and completions look at come first: a row is taken apart up to what is asked
-- of it. Some are null where others tell what they are; the view shows it.
create table execution (
    execution_rowid                integer primary key,
    partition_key                  integer not null,
    execution_id                   text not null,
    own_id                         text,
    route_id                       integer not null,
    creator_identity               text not null,
    idempotency_key                text,
    parent_execution_id            text,
    created_at_ms                  integer not null,
    payload                        blob not null,
    payload_encoding               text,
    policy                         text not null,
    attempt_timeout_ms             integer,
    retention_ms                   integer not null,
    retention_failed_ms            integer not null,
    unique (partition_key, execution_id)
) strict;

create table live (
    execution_rowid                integer primary key,
    route_id                       integer not null,
    priority                       integer not null,
    created_at_ms                  integer not null,
    ready                          integer not null check (ready in (0, 1)),
    public_state                   text not null,
    lifecycle_phase                text not null,
    ownership_state                text not null,
    attempt_state                  text,
    lease_id                       text,
    lease_epoch                    integer not null,
    lease_expires_at_ms            integer,
    open_waitpoint_count           integer not null,
    flow_id                        text,
    awaited                        integer not null check (awaited in (0, 1)),
    partition_key                  integer not null,
    execution_id                   text not null,
    instance_tag                   text,
    current_attempt_index          integer not null,
    current_attempt_id             text,
    total_attempt_count            integer not null,
    worker_id                      text,
    worker_instance_id             text,
    eligibility_state              text,
    blocking_reason                text,
    blocking_detail                text not null,
    retry_count                    integer not null,
    replay_count                   integer not null,
    lease_reclaim_count            integer not null,
    worker_deaths                  integer not null,
    lease_acquired_at_ms           integer,
    lease_last_renewed_at_ms       integer,
    lease_expired_at_ms            integer,
    lease_revoked_at_ms            integer,
    lease_revoke_reason            text,
    started_at_ms                  integer,
    last_transition_at_ms          integer not null,
    last_mutation_at_ms            integer not null,
    delay_until_ms                 integer,
    granted_until_ms               integer,
    deadline_at_ms                 integer,
    attempt_deadline_ms            integer,
    attempt_time_left_ms           integer,
    attempt_timeout_ms             integer,
    retention_ms                   integer not null,
    pending_retry_reason           text,
    pending_replay_reason          text,
    pending_replay_requested_by    text,
    pending_previous_attempt_index integer,
    progress_pct                   integer check (progress_pct between 0 and 100),
    progress_message               text,
    progress_updated_at_ms         integer,
    current_suspension_id          text,
    current_waitpoint_id           text,
    signal_count                   integer not null,
    keeps_signals                  integer not null check (keeps_signals in (0, 1)),
    cancel_requested               integer not null check (cancel_requested in (0, 1)),
    join_pending                   integer not null check (join_pending in (0, 1)),
    last_capability_mismatch_at_ms integer,
    input                          blob,
    input_encoding                 text,
    next_input                     blob,
    next_input_encoding            text,
    awaits_child                   integer not null check (awaits_child in (0, 1))
) strict;

create table ending (
    execution_rowid                integer primary key,
    partition_key                  integer not null,
    execution_id                   text not null,
    route_id                       integer not null,
    priority                       integer not null,
    instance_tag                   text,
    flow_id                        text,
    terminal_outcome               text not null,
    attempt_state                  text,
    public_state                   text not null,
    total_attempt_count            integer not null,
    current_attempt_index          integer not null,
    current_attempt_id             text,
    retry_count                    integer not null,
    replay_count                   integer not null,
    lease_reclaim_count            integer not null,
    worker_deaths                  integer not null,
    lease_epoch                    integer not null,
    final_lease_id                 text,
    final_worker_id                text,
    final_worker_instance_id       text,
    created_at_ms                  integer not null,
    started_at_ms                  integer,
    completed_at_ms                integer,
    last_transition_at_ms          integer,
    last_mutation_at_ms            integer,
    deadline_at_ms                 integer,
    retain_until_ms                integer,
    pending_retry_reason           text,
    pending_replay_reason          text,
    pending_replay_requested_by    text,
    pending_previous_attempt_index integer,
    progress_pct                   integer check (progress_pct between 0 and 100),
    progress_message               text,
    progress_updated_at_ms         integer,
    signal_count                   integer not null,
    keeps_signals                  integer not null check (keeps_signals in (0, 1)),
    cancel_requested               integer not null check (cancel_requested in (0, 1)),
    join_pending                   integer not null check (join_pending in (0, 1)),
    last_capability_mismatch_at_ms integer,
    failure_reason                 text,
    cancellation_reason            text,
    cancelled_by                   text,
    input                          blob,
    input_encoding                 text,
    next_input                     blob,
    next_input_encoding            text,
    result                         blob,
    result_encoding                text,
    awaited                        integer not null check (awaited in (0, 1))
) strict;

-- All of an execution, for reads by id.
create view execution_now as
select e.partition_key, e.execution_id, e.own_id, r.namespace, r.lane_id, r.execution_kind,
       e.route_id, coalesce(l.priority, n.priority) as priority, e.creator_identity,
       e.idempotency_key, coalesce(l.instance_tag, n.instance_tag) as instance_tag,
       coalesce(l.flow_id, n.flow_id) as flow_id, e.parent_execution_id,
       coalesce(l.lifecycle_phase, 'terminal') as lifecycle_phase,
       coalesce(l.ownership_state, 'unowned') as ownership_state,
       coalesce(l.eligibility_state, case l.lifecycle_phase
           when 'runnable' then 'eligible_now' else 'not_applicable' end) as eligibility_state,
       coalesce(l.blocking_reason, case l.lifecycle_phase
           when 'runnable' then 'waiting_for_worker' else 'none' end) as blocking_reason,
       coalesce(l.blocking_detail, '') as blocking_detail,
       coalesce(n.terminal_outcome, 'none') as terminal_outcome,
       coalesce(l.attempt_state, n.attempt_state, case
           when l.lifecycle_phase is null then 'attempt_terminal'
           when l.lifecycle_phase = 'runnable' then 'pending_first_attempt'
           else 'running_attempt' end) as attempt_state,
       coalesce(l.public_state, n.public_state) as public_state, coalesce(l.ready, 0) as ready,
       coalesce(l.total_attempt_count, n.total_attempt_count) as total_attempt_count,
       coalesce(l.current_attempt_index, n.current_attempt_index) as current_attempt_index,
       coalesce(l.current_attempt_id, l.lease_id, n.current_attempt_id, n.final_lease_id)
           as current_attempt_id,
       coalesce(l.retry_count, n.retry_count) as retry_count,
       coalesce(l.replay_count, n.replay_count) as replay_count,
       coalesce(l.lease_reclaim_count, n.lease_reclaim_count) as lease_reclaim_count,
       coalesce(l.worker_deaths, n.worker_deaths) as worker_deaths, l.lease_id,
       coalesce(l.lease_epoch, n.lease_epoch) as lease_epoch, l.worker_id, l.worker_instance_id,
       l.lease_acquired_at_ms, l.lease_expires_at_ms,
       coalesce(l.lease_last_renewed_at_ms, l.lease_acquired_at_ms) as lease_last_renewed_at_ms,
       l.lease_expired_at_ms, l.lease_revoked_at_ms, l.lease_revoke_reason,
       n.final_lease_id, n.final_worker_id, n.final_worker_instance_id,
       e.created_at_ms, coalesce(l.started_at_ms, l.lease_acquired_at_ms, n.started_at_ms) as started_at_ms,
       n.completed_at_ms,
       coalesce(l.last_transition_at_ms, n.last_transition_at_ms, n.completed_at_ms)
           as last_transition_at_ms,
       coalesce(l.last_mutation_at_ms, n.last_mutation_at_ms, n.completed_at_ms) as last_mutation_at_ms,
       l.delay_until_ms, l.granted_until_ms, coalesce(l.deadline_at_ms, n.deadline_at_ms) as deadline_at_ms,
       l.attempt_deadline_ms, l.attempt_time_left_ms, n.retain_until_ms,
       coalesce(l.pending_retry_reason, n.pending_retry_reason) as pending_retry_reason,
       coalesce(l.pending_replay_reason, n.pending_replay_reason) as pending_replay_reason,
       coalesce(l.pending_replay_requested_by, n.pending_replay_requested_by)
           as pending_replay_requested_by,
       coalesce(l.pending_previous_attempt_index, n.pending_previous_attempt_index)
           as pending_previous_attempt_index,
       coalesce(l.progress_pct, n.progress_pct) as progress_pct,
       coalesce(l.progress_message, n.progress_message) as progress_message,
       coalesce(l.progress_updated_at_ms, n.progress_updated_at_ms) as progress_updated_at_ms,
       l.current_suspension_id, l.current_waitpoint_id,
       coalesce(l.open_waitpoint_count, 0) as open_waitpoint_count,
       coalesce(l.signal_count, n.signal_count) as signal_count,
       coalesce(l.keeps_signals, n.keeps_signals) as keeps_signals,
       coalesce(l.cancel_requested, n.cancel_requested) as cancel_requested,
       coalesce(l.join_pending, n.join_pending) as join_pending,
       coalesce(l.last_capability_mismatch_at_ms, n.last_capability_mismatch_at_ms)
           as last_capability_mismatch_at_ms,
       n.failure_reason, n.cancellation_reason, n.cancelled_by, e.payload, e.payload_encoding,
       coalesce(l.input, n.input) as input,
       coalesce(l.input_encoding, n.input_encoding) as input_encoding,
       coalesce(l.next_input, n.next_input) as next_input,
       coalesce(l.next_input_encoding, n.next_input_encoding) as next_input_encoding, n.result,
       n.result_encoding, e.policy, coalesce(l.awaited, n.awaited) as awaited,
       coalesce(l.awaits_child, 0) as awaits_child, e.attempt_timeout_ms, e.retention_ms,
       e.retention_failed_ms
  from execution e
  left join route r on r.route_id = e.route_id
  left join live l on l.execution_rowid = e.execution_rowid
  left join ending n on n.execution_rowid = e.execution_rowid;

-- Executions as their flows see them, found by the flow.
create view flow_member as
select partition_key, execution_id, route_id, flow_id, lifecycle_phase,
       coalesce(eligibility_state, case lifecycle_phase
           when 'runnable' then 'eligible_now' else 'not_applicable' end) as eligibility_state,
       coalesce(blocking_reason, case lifecycle_phase
           when 'runnable' then 'waiting_for_worker' else 'none' end) as blocking_reason,
       'none' as terminal_outcome, public_state, replay_count, cancel_requested,
       join_pending, awaited, awaits_child, null as completed_at_ms, null as cancellation_reason
  from live
 where flow_id is not null
union all
select partition_key, execution_id, route_id, flow_id, 'terminal' as lifecycle_phase,
       'not_applicable' as eligibility_state, 'none' as blocking_reason, terminal_outcome,
       public_state, replay_count, cancel_requested, join_pending, awaited, 0 as awaits_child,
       completed_at_ms, cancellation_reason
  from ending
 where flow_id is not null;

-- What can be claimed, what waits and what lost its lease, per kind of work, best first.
create index live_ready on live (public_state, route_id, priority desc, created_at_ms, execution_id)
    where ready;
-- Of what waits, those that go on with an attempt: a limit on starts does not hold them up.
create index live_resuming on live (public_state, route_id, priority desc, created_at_ms, execution_id)
    where ready and public_state = 'waiting' and attempt_state = 'attempt_interrupted';

-- What time makes due. All partial: a row that waits for nothing is in none of them.
create index live_leased on live (ownership_state, lease_expires_at_ms)
    where lifecycle_phase = 'active';
create index live_delay_due on live (delay_until_ms)
    where eligibility_state = 'not_eligible_until_time';
create index live_attempt_due on live (attempt_deadline_ms)
    where attempt_deadline_ms is not null;
create index live_deadline_due on live (deadline_at_ms)
    where deadline_at_ms is not null;
create index ending_retention_due on ending (retain_until_ms)
    where retain_until_ms is not null;

-- What changed code stopped, for workers that bring other code.
create index live_blocked on live (route_id, last_transition_at_ms)
    where blocking_reason = 'waiting_for_code';

-- Lists, newest first, page by page. Of what waits there is a queue already.
create index live_by_route on live (route_id, public_state, created_at_ms, execution_id)
    where not (ready and public_state = 'waiting');
create index ending_by_route on ending (route_id, public_state, created_at_ms, execution_id);
create index execution_by_parent on execution (parent_execution_id)
    where parent_execution_id is not null;

create table attempt (
    partition_key                integer not null,
    execution_id                 text not null,
    attempt_index                integer not null,
    attempt_id                   text not null,
    attempt_type                 text not null,
    attempt_state                text not null,
    created_at_ms                integer not null,
    started_at_ms                integer,
    ended_at_ms                  integer,
    suspended_at_ms              integer,
    resumed_at_ms                integer,
    suspension_id                text,
    blocked_on                   text,
    blocked_count                integer not null default 0,
    lease_id                     text,
    lease_epoch                  integer not null,
    worker_id                    text,
    worker_instance_id           text,
    failure_reason               text,
    failure_category             text,
    failure_traceback            text,
    failed_step_key              text,
    failed_step_name             text,
    failed_step_line             text,
    failed_step_error            text,
    failed_step_duration_ms      integer,
    retry_reason                 text,
    previous_attempt_index       integer,
    replay_reason                text,
    replay_requested_by          text,
    replayed_from_attempt_index  integer,
    reclaim_reason               text,
    primary key (partition_key, execution_id, attempt_index)
) strict, without rowid;

create table execution_tag (
    partition_key  integer not null,
    execution_id   text not null,
    tag_key        text not null,
    tag_value      text not null,
    created_at_ms  integer not null,
    primary key (partition_key, execution_id, tag_key)
) strict, without rowid;

create index execution_tag_by_value
    on execution_tag (tag_key, tag_value, created_at_ms, execution_id, partition_key);

create table claim_grant (
    partition_key       integer not null,
    execution_id        text not null,
    route_id            integer not null,
    grant_id            text not null,
    kind                text not null check (kind in ('claim', 'reclaim')),
    worker_id           text not null,
    worker_instance_id  text not null,
    issued_at_ms        integer not null,
    expires_at_ms       integer not null,
    counted_by          text not null,
    primary key (partition_key, execution_id)
) strict, without rowid;

create index claim_grant_due on claim_grant (expires_at_ms);
create index claim_grant_by_route on claim_grant (route_id);

create table idempotency_guard (
    namespace        text not null,
    idempotency_key  text not null,
    execution        text not null,
    fingerprint      blob not null,
    expires_at_ms    integer,
    primary key (namespace, idempotency_key)
) strict, without rowid;

create index idempotency_guard_due on idempotency_guard (expires_at_ms)
    where expires_at_ms is not null;

create table worker (
    namespace           text not null,
    worker_instance_id  text not null,
    worker_id           text not null,
    lanes               text not null,
    kinds               text,
    capabilities        text not null,
    registered_at_ms    integer not null,
    running_since_ms    integer not null,
    last_heartbeat_ms   integer not null,
    liveness_ttl_ms     integer not null,
    expires_at_ms       integer not null,
    primary key (namespace, worker_instance_id)
) strict, without rowid;

create index worker_due on worker (expires_at_ms);

create table worker_event (
    event_id            text not null primary key,
    namespace           text not null,
    worker_instance_id  text not null,
    worker_id           text not null,
    event_kind          text not null check (event_kind in ('registered', 'marked_dead', 'ttl_swept')),
    event_at_ms         integer not null,
    reason              text not null
) strict, without rowid;

create index worker_event_by_time on worker_event (event_at_ms, event_id);

create table event (
    event_id            integer primary key autoincrement,
    occurred_at_ms      integer not null,
    partition_key       integer not null,
    execution_id        text not null,
    category            text not null,
    event_type          text not null,
    namespace           text not null,
    flow_id             text,
    lease_id            text,
    lease_epoch         integer,
    attempt_index       integer,
    worker_instance_id  text,
    instance_tag        text,
    reason              text,
    details             text
) strict;

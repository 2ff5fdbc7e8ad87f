-- backward-compatible: no
--
-- Executions and what belongs to them.
--
-- Hot tables are vacuumed early but not analyzed while they are tiny: statements are
-- planned once, and a plan for ten rows must not be in use when there are thousands.

create table deployment (
    singleton              boolean primary key default true check (singleton),
    num_flow_partitions    integer not null check (num_flow_partitions > 0),
    num_budget_partitions  integer not null check (num_budget_partitions > 0),
    num_quota_partitions   integer not null check (num_quota_partitions > 0),
    handle_key             bytea not null check (length(handle_key) = 32),
    created_at_ms          bigint not null,
    -- The number of the newest event that was deleted for its age.
    events_gone_through    bigint not null default 0
);

insert into deployment (
    num_flow_partitions, num_budget_partitions, num_quota_partitions, handle_key, created_at_ms
) values (
    256, 32, 32,
    uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()),
    floor(extract(epoch from clock_timestamp()) * 1000)::bigint
);

-- The time, for statements that both databases share.
create view this_moment as
select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms;

create table lane (
    lane_id              text collate "C" primary key,
    state                text not null check (state in ('active', 'paused', 'draining', 'disabled')),
    registered_at_ms     bigint not null,
    registered_by        text not null,
    state_changed_at_ms  bigint
);

insert into lane (lane_id, state, registered_at_ms, registered_by) values
    ('default', 'active', floor(extract(epoch from clock_timestamp()) * 1000)::bigint, 'deployment');

create table route (
    route_id               integer generated always as identity primary key,
    namespace              text not null,
    lane_id                text not null,
    execution_kind         text not null,
    required_capabilities  text[] not null default '{}',
    -- The limits its executions were submitted under, as a JSON array; see `gate`.
    gate_ids               text not null default '[]',
    -- Whether claims ask gates: those, or those of a budget over all of the route.
    gated                  boolean not null default false,
    -- Of capabilities and gates: what they may be is more than an index can hold.
    needs_hash             bytea not null,
    created_at_ms          bigint not null,
    retain_until_ms        bigint not null,
    constraint route_key unique (namespace, lane_id, execution_kind, needs_hash)
);

create index route_by_kind on route (execution_kind, lane_id, gated, route_id);
create index route_retention on route (retain_until_ms);

-- Four bytes each, and readable: every job writes them several times.
create type lifecycle_phase as enum (
    'submitted', 'runnable', 'active', 'suspended', 'terminal');
create type ownership_state as enum (
    'unowned', 'leased', 'lease_expired_reclaimable', 'lease_revoked');
create type eligibility_state as enum (
    'eligible_now', 'not_eligible_until_time', 'blocked_by_dependencies', 'blocked_by_budget',
    'blocked_by_quota', 'blocked_by_route', 'blocked_by_lane_state', 'blocked_by_operator',
    'not_applicable');
create type blocking_reason as enum (
    'none', 'waiting_for_worker', 'waiting_for_retry_backoff', 'waiting_for_resume_delay',
    'waiting_for_delay', 'waiting_for_signal', 'waiting_for_approval', 'waiting_for_callback',
    'waiting_for_tool_result', 'waiting_for_children', 'waiting_for_budget', 'waiting_for_quota',
    'waiting_for_capable_worker', 'waiting_for_locality_match', 'paused_by_operator',
    'paused_by_policy', 'paused_by_flow_cancel', 'waiting_for_code');
create type attempt_state as enum (
    'none', 'pending_first_attempt', 'running_attempt', 'attempt_interrupted',
    'pending_retry_attempt', 'pending_replay_attempt', 'attempt_terminal');
create type terminal_outcome as enum (
    'none', 'success', 'failed', 'cancelled', 'expired', 'skipped');
create type public_state as enum (
    'waiting', 'delayed', 'rate_limited', 'waiting_children', 'active', 'suspended', 'resumable',
    'completed', 'failed', 'cancelled', 'expired', 'skipped');

-- An execution by phase of its life: what was asked, written once; what is going on, as long as
-- it has not ended; how it ended.
--
-- Columns that indexes hold come first, those of fixed width before the others: every update
-- compares them, and finds what stands behind a text or a null only by walking there.
--
-- Where claims and completions write, keys begin with the uuid, which grows with time: what is done
-- together lies together. By partition, each row of a batch would be on another page.
create table execution (
    execution_id                   uuid not null,
    created_at_ms                  bigint not null,
    route_id                       integer not null,
    partition_key                  smallint not null,
    payload                        bytea not null,
    creator_identity               text,
    policy                         text,
    attempt_timeout_ms             bigint,
    retention_ms                   bigint,
    retention_failed_ms            bigint,
    own_id                         text,
    idempotency_key                text,
    parent_execution_id            text,
    payload_encoding               text,
    primary key (partition_key, execution_id)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500
);

create table live (
    execution_id                   uuid not null,
    created_at_ms                  bigint not null,
    route_id                       integer not null,
    priority                       integer not null,
    partition_key                  smallint not null,
    ready                          boolean not null,
    lifecycle_phase                lifecycle_phase not null,
    ownership_state                ownership_state not null,
    public_state                   public_state not null,
    eligibility_state              eligibility_state,
    blocking_reason                blocking_reason,
    attempt_state                  attempt_state,
    flow_id                        uuid,
    current_attempt_id             uuid,
    lease_id                       uuid,
    current_suspension_id          uuid,
    current_waitpoint_id           uuid,
    last_transition_at_ms          bigint,
    last_mutation_at_ms            bigint,
    lease_acquired_at_ms           bigint,
    lease_expires_at_ms            bigint,
    lease_last_renewed_at_ms       bigint,
    lease_expired_at_ms            bigint,
    lease_revoked_at_ms            bigint,
    started_at_ms                  bigint,
    delay_until_ms                 bigint,
    granted_until_ms               bigint,
    deadline_at_ms                 bigint,
    attempt_deadline_ms            bigint,
    attempt_time_left_ms           bigint,
    attempt_timeout_ms             bigint,
    retention_ms                   bigint,
    progress_updated_at_ms         bigint,
    last_capability_mismatch_at_ms bigint,
    lease_epoch                    integer,
    total_attempt_count            integer,
    current_attempt_index          integer,
    retry_count                    integer,
    replay_count                   integer,
    lease_reclaim_count            integer,
    worker_deaths                  integer,
    open_waitpoint_count           integer,
    signal_count                   integer,
    pending_previous_attempt_index integer,
    progress_pct                   integer,
    keeps_signals                  boolean,
    cancel_requested               boolean,
    join_pending                   boolean,
    awaited                        boolean,
    awaits_child                   boolean,
    blocking_detail                text,
    instance_tag                   text,
    worker_id                      text,
    worker_instance_id             text,
    lease_revoke_reason            text,
    pending_retry_reason           text,
    pending_replay_reason          text,
    pending_replay_requested_by    text,
    progress_message               text,
    input                          bytea,
    input_encoding                 text,
    next_input                     bytea,
    next_input_encoding            text,
    primary key (execution_id, partition_key)
) with (
    fillfactor = 35,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

create table ending (
    execution_id                   uuid not null,
    created_at_ms                  bigint not null,
    route_id                       integer not null,
    partition_key                  smallint not null,
    terminal_outcome               terminal_outcome not null,
    public_state                   public_state not null,
    attempt_state                  attempt_state,
    priority                       integer,
    flow_id                        uuid,
    current_attempt_id             uuid,
    final_lease_id                 uuid,
    last_transition_at_ms          bigint,
    last_mutation_at_ms            bigint,
    started_at_ms                  bigint,
    completed_at_ms                bigint,
    deadline_at_ms                 bigint,
    retain_until_ms                bigint,
    progress_updated_at_ms         bigint,
    last_capability_mismatch_at_ms bigint,
    lease_epoch                    integer,
    total_attempt_count            integer,
    current_attempt_index          integer,
    retry_count                    integer,
    replay_count                   integer,
    lease_reclaim_count            integer,
    worker_deaths                  integer,
    signal_count                   integer,
    pending_previous_attempt_index integer,
    progress_pct                   integer,
    keeps_signals                  boolean,
    cancel_requested               boolean,
    join_pending                   boolean,
    awaited                        boolean,
    instance_tag                   text,
    final_worker_id                text,
    final_worker_instance_id       text,
    pending_retry_reason           text,
    pending_replay_reason          text,
    pending_replay_requested_by    text,
    progress_message               text,
    failure_reason                 text,
    cancellation_reason            text,
    cancelled_by                   text,
    input                          bytea,
    input_encoding                 text,
    next_input                     bytea,
    next_input_encoding            text,
    result                         bytea,
    result_encoding                text,
    primary key (execution_id, partition_key)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500
);

-- All of an execution, for reads by id.
create view execution_now as
select e.partition_key, e.execution_id, e.own_id, r.namespace, r.lane_id, r.execution_kind,
       e.route_id, coalesce(l.priority, n.priority, 0) as priority,
       coalesce(e.creator_identity, '') as creator_identity, e.idempotency_key,
       coalesce(l.instance_tag, n.instance_tag) as instance_tag,
       coalesce(l.flow_id, n.flow_id) as flow_id, e.parent_execution_id,
       coalesce(l.lifecycle_phase, 'terminal')::text as lifecycle_phase,
       coalesce(l.ownership_state, 'unowned')::text as ownership_state,
       coalesce(l.eligibility_state::text, case l.lifecycle_phase
           when 'runnable' then 'eligible_now' else 'not_applicable' end) as eligibility_state,
       coalesce(l.blocking_reason::text, case l.lifecycle_phase
           when 'runnable' then 'waiting_for_worker' else 'none' end) as blocking_reason,
       coalesce(l.blocking_detail, '') as blocking_detail,
       coalesce(n.terminal_outcome, 'none')::text as terminal_outcome,
       coalesce(l.attempt_state::text, n.attempt_state::text, case
           when l.lifecycle_phase is null then 'attempt_terminal'
           when l.lifecycle_phase = 'runnable' then 'pending_first_attempt'
           else 'running_attempt' end) as attempt_state,
       coalesce(l.public_state, n.public_state)::text as public_state,
       coalesce(l.ready, false) as ready,
       coalesce(l.total_attempt_count, l.lease_epoch, n.total_attempt_count, n.lease_epoch, 0)
           as total_attempt_count,
       coalesce(l.current_attempt_index, n.current_attempt_index, 0) as current_attempt_index,
       coalesce(l.current_attempt_id, l.lease_id, n.current_attempt_id, n.final_lease_id)
           as current_attempt_id,
       coalesce(l.retry_count, n.retry_count, 0) as retry_count,
       coalesce(l.replay_count, n.replay_count, 0) as replay_count,
       coalesce(l.lease_reclaim_count, n.lease_reclaim_count, 0) as lease_reclaim_count,
       coalesce(l.worker_deaths, n.worker_deaths, 0) as worker_deaths, l.lease_id,
       coalesce(l.lease_epoch, n.lease_epoch, 0) as lease_epoch, l.worker_id,
       l.worker_instance_id, l.lease_acquired_at_ms, l.lease_expires_at_ms,
       coalesce(l.lease_last_renewed_at_ms, l.lease_acquired_at_ms) as lease_last_renewed_at_ms,
       l.lease_expired_at_ms, l.lease_revoked_at_ms, l.lease_revoke_reason, n.final_lease_id,
       n.final_worker_id, n.final_worker_instance_id, e.created_at_ms,
       coalesce(l.started_at_ms, l.lease_acquired_at_ms, n.started_at_ms) as started_at_ms, n.completed_at_ms,
       coalesce(
           l.last_transition_at_ms, l.lease_acquired_at_ms, l.created_at_ms,
           n.last_transition_at_ms, n.completed_at_ms) as last_transition_at_ms,
       coalesce(
           l.last_mutation_at_ms, l.last_transition_at_ms, l.lease_acquired_at_ms,
           l.created_at_ms, n.last_mutation_at_ms, n.completed_at_ms) as last_mutation_at_ms,
       l.delay_until_ms, l.granted_until_ms,
       coalesce(l.deadline_at_ms, n.deadline_at_ms) as deadline_at_ms,
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
       coalesce(l.signal_count, n.signal_count, 0) as signal_count,
       coalesce(l.keeps_signals, n.keeps_signals, false) as keeps_signals,
       coalesce(l.cancel_requested, n.cancel_requested, false) as cancel_requested,
       coalesce(l.join_pending, n.join_pending, false) as join_pending,
       coalesce(l.last_capability_mismatch_at_ms, n.last_capability_mismatch_at_ms)
           as last_capability_mismatch_at_ms,
       n.failure_reason, n.cancellation_reason, n.cancelled_by, e.payload, e.payload_encoding,
       coalesce(l.input, n.input) as input,
       coalesce(l.input_encoding, n.input_encoding) as input_encoding,
       coalesce(l.next_input, n.next_input) as next_input,
       coalesce(l.next_input_encoding, n.next_input_encoding) as next_input_encoding, n.result,
       n.result_encoding, coalesce(e.policy, '{}') as policy,
       coalesce(l.awaited, n.awaited, false) as awaited,
       coalesce(l.awaits_child, false) as awaits_child, e.attempt_timeout_ms,
       coalesce(e.retention_ms, 604800000) as retention_ms,
       coalesce(e.retention_failed_ms, 2592000000) as retention_failed_ms,
       coalesce(l.xmin, n.xmin) as version
  from execution e
  left join route r on r.route_id = e.route_id
  left join live l on l.partition_key = e.partition_key and l.execution_id = e.execution_id
  left join ending n on n.partition_key = e.partition_key and n.execution_id = e.execution_id;

-- Executions as their flows see them, found by the flow.
create view flow_member as
select partition_key, execution_id, route_id, flow_id, lifecycle_phase::text as lifecycle_phase,
       coalesce(eligibility_state::text, case lifecycle_phase
           when 'runnable' then 'eligible_now' else 'not_applicable' end) as eligibility_state,
       coalesce(blocking_reason::text, case lifecycle_phase
           when 'runnable' then 'waiting_for_worker' else 'none' end) as blocking_reason,
       'none'::text as terminal_outcome, public_state::text as public_state,
       coalesce(replay_count, 0) as replay_count,
       coalesce(cancel_requested, false) as cancel_requested,
       coalesce(join_pending, false) as join_pending, coalesce(awaited, false) as awaited,
       coalesce(awaits_child, false) as awaits_child, null::bigint as completed_at_ms,
       null::text as cancellation_reason
  from live
 where flow_id is not null
union all
select partition_key, execution_id, route_id, flow_id, 'terminal'::text as lifecycle_phase,
       'not_applicable'::text as eligibility_state, 'none'::text as blocking_reason,
       terminal_outcome::text as terminal_outcome, public_state::text as public_state,
       coalesce(replay_count, 0) as replay_count,
       coalesce(cancel_requested, false) as cancel_requested,
       coalesce(join_pending, false) as join_pending, coalesce(awaited, false) as awaited,
       false as awaits_child, completed_at_ms, cancellation_reason
  from ending
 where flow_id is not null;

-- What can be claimed, per kind of work, best first: what waits, and what lost its lease.
create index live_waiting on live (route_id, priority desc, created_at_ms, execution_id)
    where ready and public_state = 'waiting';
create index live_lost on live (route_id, priority desc, created_at_ms, execution_id)
    where ready and public_state = 'active';
-- Of what waits, those that go on with an attempt: a limit on starts does not hold them up.
create index live_resuming on live (route_id, priority desc, created_at_ms, execution_id)
    where ready and public_state = 'waiting' and attempt_state = 'attempt_interrupted';

-- What time makes due. All partial: a row that waits for nothing is in none of them.
create index live_leased on live (lease_expires_at_ms)
    where lifecycle_phase = 'active' and ownership_state = 'leased';
create index live_overdue on live (lease_expires_at_ms)
    where lifecycle_phase = 'active' and ownership_state = 'lease_expired_reclaimable';
create index live_delay_due on live (delay_until_ms)
    where eligibility_state = 'not_eligible_until_time';
create index live_attempt_due on live (attempt_deadline_ms)
    where attempt_deadline_ms is not null;
create index live_deadline_due on live (deadline_at_ms)
    where deadline_at_ms is not null;
create index ending_retention_due on ending (retain_until_ms)
    where retain_until_ms is not null;

-- What changed code stopped, for workers that bring other code.
create index live_blocked on live (route_id, coalesce(last_transition_at_ms, created_at_ms))
    where blocking_reason = 'waiting_for_code';

-- Lists, newest first, page by page. Of what waits there is a queue already.
create index live_by_route on live (route_id, public_state, created_at_ms, execution_id)
    where not (ready and public_state = 'waiting');
create index ending_by_route on ending (route_id, public_state, created_at_ms, execution_id);
create index execution_by_parent on execution (parent_execution_id)
    where parent_execution_id is not null;

create table attempt (
    execution_id                 uuid not null,
    attempt_id                   uuid not null,
    created_at_ms                bigint not null,
    lease_epoch                  bigint not null,
    attempt_index                integer not null,
    blocked_count                integer not null default 0,
    partition_key                smallint not null,
    attempt_type                 text not null,
    attempt_state                text not null,
    started_at_ms                bigint,
    ended_at_ms                  bigint,
    suspended_at_ms              bigint,
    resumed_at_ms                bigint,
    suspension_id                text,
    blocked_on                   text,
    lease_id                     uuid,
    worker_id                    text,
    worker_instance_id           text,
    failure_reason               text,
    failure_category             text,
    failure_traceback            text,
    failed_step_key              text,
    failed_step_name             text,
    failed_step_line             text,
    failed_step_error            text,
    failed_step_duration_ms      bigint,
    retry_reason                 text,
    previous_attempt_index       integer,
    replay_reason                text,
    replay_requested_by          text,
    replayed_from_attempt_index  integer,
    reclaim_reason               text,
    primary key (partition_key, execution_id, attempt_index)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

create table execution_tag (
    execution_id   uuid not null,
    created_at_ms  bigint not null,
    partition_key  smallint not null,
    tag_key        text not null,
    tag_value      text not null,
    primary key (partition_key, execution_id, tag_key)
) with (
    autovacuum_analyze_threshold = 500
);

-- By a hash: a value may be longer than an index can hold.
create index execution_tag_by_value
    on execution_tag (
        tag_key, hashtextextended(tag_value, 0), created_at_ms, execution_id, partition_key);

create table claim_grant (
    execution_id        uuid not null,
    issued_at_ms        bigint not null,
    expires_at_ms       bigint not null,
    route_id            integer not null,
    partition_key       smallint not null,
    grant_id            text not null,
    kind                text not null check (kind in ('claim', 'reclaim')),
    worker_id           text not null,
    worker_instance_id  text not null,
    counted_by          text not null,
    primary key (partition_key, execution_id)
);

create index claim_grant_due on claim_grant (expires_at_ms);
create index claim_grant_by_route on claim_grant (route_id);

create table idempotency_guard (
    namespace        text not null,
    idempotency_key  text not null,
    execution        text not null,
    fingerprint      bytea not null,
    expires_at_ms    bigint,
    primary key (namespace, idempotency_key)
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_threshold = 500
);

create index idempotency_guard_due on idempotency_guard (expires_at_ms)
    where expires_at_ms is not null;

create table worker (
    namespace           text collate "C" not null,
    worker_instance_id  text collate "C" not null,
    worker_id           text not null,
    lanes               text not null,
    kinds               text,
    capabilities        text not null,
    registered_at_ms    bigint not null,
    running_since_ms    bigint not null,
    last_heartbeat_ms   bigint not null,
    liveness_ttl_ms     bigint not null,
    expires_at_ms       bigint not null,
    primary key (namespace, worker_instance_id)
) with (fillfactor = 70);

create index worker_due on worker (expires_at_ms);

create table worker_event (
    event_id            text not null primary key,
    namespace           text not null,
    worker_instance_id  text not null,
    worker_id           text not null,
    event_kind          text not null check (event_kind in ('registered', 'marked_dead', 'ttl_swept')),
    event_at_ms         bigint not null,
    reason              text not null
);

create index worker_event_by_time on worker_event (event_at_ms, event_id);

-- One row holds events of a kind that happened together: the columns of arrays hold one value
-- per event, the others what all have in common. So a batch of work costs a row or two. The
-- identity hands out ids for as many events as a row may hold: `event_id` is that of the first,
-- the others follow.
create table event (
    event_id            bigint generated always as identity (start with 4096 increment by 4096)
                        primary key,
    occurred_at_ms      bigint not null,
    category            text not null,
    event_type          text not null,
    namespace           text not null,
    instance_tag        text,
    worker_instance_id  text,
    reason              text,
    details             text,
    partition_key       smallint[] not null,
    execution_id        uuid[] not null,
    flow_id             uuid[],
    lease_id            uuid[],
    lease_epoch         bigint[],
    attempt_index       integer[]
) with (
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500
);

-- Random by nature: trying to compress them only takes time.
alter table event
    alter column execution_id set storage external,
    alter column lease_id set storage external;

-- The log, an event a row, for people.
create view event_log as
select event.event_id + each.place - 1 as event_id, event.occurred_at_ms, event.category,
       event.event_type, each.partition_key, each.execution_id, each.flow_id, each.lease_id,
       each.lease_epoch, each.attempt_index, event.worker_instance_id, event.reason,
       event.details, event.namespace, event.instance_tag
  from event
 cross join lateral unnest(
    event.partition_key, event.execution_id, event.flow_id, event.lease_id, event.lease_epoch,
    event.attempt_index
 ) with ordinality as each (
    partition_key, execution_id, flow_id, lease_id, lease_epoch, attempt_index, place);

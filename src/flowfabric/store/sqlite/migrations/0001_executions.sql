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
    created_at_ms          integer not null
) strict;

insert into deployment (
    num_flow_partitions, num_budget_partitions, num_quota_partitions, handle_key, created_at_ms
) values (
    256, 32, 32,
    randomblob(32),
    cast((julianday('now') - 2440587.5) * 86400000 as integer)
);

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
    created_at_ms          integer not null,
    retain_until_ms        integer not null,
    constraint route_key unique (namespace, lane_id, execution_kind, required_capabilities)
) strict;

create index route_by_kind on route (execution_kind, lane_id);
create index route_retention on route (retain_until_ms);

create table execution (
    partition_key                   integer not null,
    execution_id                    text not null,
    route_id                        integer not null,
    created_at_ms                   integer not null,
    last_transition_at_ms           integer not null,
    last_mutation_at_ms             integer not null,
    lease_epoch                     integer not null,
    ready                           integer not null check (ready in (0, 1)),
    priority                        integer not null,
    total_attempt_count             integer not null,
    current_attempt_index           integer not null,
    retry_count                     integer not null,
    replay_count                    integer not null,
    lease_reclaim_count             integer not null,
    worker_deaths                   integer not null default 0,
    lifecycle_phase                 text not null,
    ownership_state                 text not null,
    eligibility_state               text not null,
    blocking_reason                 text not null,
    blocking_detail                 text not null,
    terminal_outcome                text not null,
    attempt_state                   text not null,
    public_state                    text not null,
    namespace                       text not null,
    lane_id                         text not null,
    execution_kind                  text not null,
    creator_identity                text not null,
    idempotency_key                 text,
    instance_tag                    text,
    flow_id                         text,
    parent_execution_id             text,
    own_id                          text,
    current_attempt_id              text,
    lease_id                        text,
    worker_id                       text,
    worker_instance_id              text,
    lease_acquired_at_ms            integer,
    lease_expires_at_ms             integer,
    lease_last_renewed_at_ms        integer,
    lease_renewal_deadline_ms       integer,
    lease_expired_at_ms             integer,
    lease_revoked_at_ms             integer,
    lease_revoke_reason             text,
    final_lease_id                  text,
    final_worker_id                 text,
    final_worker_instance_id        text,
    started_at_ms                   integer,
    completed_at_ms                 integer,
    delay_until_ms                  integer,
    deadline_at_ms                  integer,
    attempt_timeout_ms              integer,
    retention_ms                    integer,
    retention_failed_ms             integer,
    attempt_deadline_ms             integer,
    attempt_time_left_ms            integer,
    retain_until_ms                 integer,
    pending_retry_reason            text,
    pending_replay_reason           text,
    pending_replay_requested_by     text,
    pending_previous_attempt_index  integer,
    progress_pct                    integer check (progress_pct between 0 and 100),
    progress_message                text,
    progress_updated_at_ms          integer,
    current_suspension_id           text,
    current_waitpoint_id            text,
    last_capability_mismatch_at_ms  integer,
    failure_reason                  text,
    cancellation_reason             text,
    cancelled_by                    text,
    payload_encoding                text,
    result_encoding                 text,
    policy                          text not null,
    payload                         blob not null,
    result                          blob,
    primary key (partition_key, execution_id)
) strict;

-- What can be claimed, per kind of work, best first.
create index execution_ready on execution (route_id, priority desc, created_at_ms, execution_id)
    where ready;

-- What time makes due. All partial: a row that waits for nothing is in none of them.
create index execution_active on execution (ownership_state, lease_expires_at_ms)
    where lifecycle_phase = 'active';
create index execution_delay_due on execution (delay_until_ms)
    where eligibility_state = 'not_eligible_until_time';
create index execution_attempt_due on execution (attempt_deadline_ms)
    where attempt_deadline_ms is not null;
create index execution_deadline_due on execution (deadline_at_ms)
    where deadline_at_ms is not null and lifecycle_phase <> 'terminal';
create index execution_retention_due on execution (retain_until_ms)
    where retain_until_ms is not null;

-- What changed code stopped, for workers that bring other code.
create index execution_blocked on execution (execution_kind, last_transition_at_ms)
    where blocking_reason = 'waiting_for_code';

-- Lists, newest or oldest first, page by page.
create index execution_by_route on execution (
    route_id, public_state, created_at_ms, execution_id, partition_key);
create index execution_by_namespace on execution (
    namespace, created_at_ms, execution_id, partition_key);
create index execution_by_flow on execution (flow_id) where flow_id is not null;
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
    grant_id            text not null,
    kind                text not null,
    worker_id           text not null,
    worker_instance_id  text not null,
    issued_at_ms        integer not null,
    expires_at_ms       integer not null,
    primary key (partition_key, execution_id)
) strict, without rowid;

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

create table worker_presence (
    worker_instance_id  text not null primary key,
    worker_id           text not null,
    namespace           text,
    lanes               text not null,
    kinds               text,
    capabilities        text not null,
    last_seen_ms        integer not null
) strict, without rowid;

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

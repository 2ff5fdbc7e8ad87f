-- backward-compatible: no
--
-- Suspensions, the waitpoints they wait at, and the signals delivered there.

create table suspension (
    sequence                       bigint generated always as identity,
    execution_id                   uuid not null,
    suspension_id                  uuid not null,
    waitpoint_id                   uuid not null,
    created_at_ms                  bigint not null,
    attempt_index                  integer not null,
    partition_key                  smallint not null,
    reason_code                    text not null,
    requested_by                   text not null,
    resume_condition               text not null,
    resume_policy                  text not null,
    timeout_at_ms                  bigint,
    timeout_behavior               text,
    continuation_metadata_pointer  text,
    last_signal_at_ms              bigint,
    satisfied_at_ms                bigint,
    closed_at_ms                   bigint,
    close_reason                   text,
    closer_signal_id               uuid,
    primary key (partition_key, execution_id, suspension_id)
) with (fillfactor = 80);

-- One open suspension per execution; the list of suspended executions; what is due.
create unique index suspension_open on suspension (partition_key, execution_id)
    where closed_at_ms is null;
create index suspension_listed on suspension (created_at_ms, execution_id)
    where closed_at_ms is null;
create index suspension_timeout_due on suspension (timeout_at_ms)
    where closed_at_ms is null and timeout_at_ms is not null;

create table waitpoint (
    execution_id           uuid not null,
    waitpoint_id           uuid not null,
    suspension_id          uuid,
    created_at_ms          bigint not null,
    attempt_index          integer not null,
    ordinal                integer not null,
    signal_count           integer not null,
    matched_signal_count   integer not null,
    own_name_only          boolean not null,
    ended_with_execution   boolean not null,
    partition_key          smallint not null,
    state                  text not null check (state in ('pending', 'active', 'closed')),
    waitpoint_key          text not null,
    token_kid              text not null,
    token_fingerprint      text not null,
    required_signal_names  text not null,
    activated_at_ms        bigint,
    expires_at_ms          bigint,
    token_expires_at_ms    bigint,
    satisfied_at_ms        bigint,
    closed_at_ms           bigint,
    close_reason           text,
    last_signal_at_ms      bigint,
    primary key (partition_key, execution_id, waitpoint_id)
) with (fillfactor = 80);

create index waitpoint_of_suspension
    on waitpoint (partition_key, execution_id, suspension_id, ordinal);
create index waitpoint_open on waitpoint (partition_key, execution_id, waitpoint_id)
    where state <> 'closed';
create index waitpoint_expiry_due on waitpoint (expires_at_ms)
    where state = 'pending' and expires_at_ms is not null;

create table signal (
    execution_id      uuid not null,
    signal_id         uuid not null,
    waitpoint_id      uuid not null,
    suspension_id     uuid,
    sequence          bigint not null,
    created_at_ms     bigint not null,
    accepted_at_ms    bigint not null,
    partition_key     smallint not null,
    matched           boolean not null,
    satisfier         boolean not null,
    waitpoint_key     text not null,
    signal_name       text not null,
    signal_category   text not null,
    source_type       text not null,
    source_identity   text not null,
    correlation_id    text not null,
    target_scope      text not null,
    observed_effect   text not null,
    payload_encoding  text not null,
    idempotency_key   text,
    payload           bytea,
    primary key (partition_key, execution_id, signal_id)
);

create index signal_of_suspension
    on signal (partition_key, execution_id, suspension_id, satisfier, sequence);
create index signal_kept on signal (partition_key, execution_id, sequence)
    where suspension_id is null;

create table signal_dedup (
    execution_id     uuid not null,
    waitpoint_id     uuid not null,
    signal_id        uuid not null,
    partition_key    smallint not null,
    idempotency_key  text not null,
    expires_at_ms    bigint,
    primary key (partition_key, execution_id, waitpoint_id, idempotency_key)
);

create table suspend_dedup (
    execution_id        uuid not null,
    suspension_id       uuid not null,
    lease_id            uuid not null,
    attempt_id          uuid not null,
    lease_epoch         bigint not null,
    lease_ttl_ms        bigint not null,
    expires_at_ms       bigint not null,
    attempt_index       integer not null,
    partition_key       smallint not null,
    already_satisfied   boolean not null,
    idempotency_key     text not null,
    worker_instance_id  text not null,
    primary key (partition_key, execution_id, idempotency_key)
);

create table waitpoint_hmac (
    kid              text collate "C" primary key check (kid <> '' and position(':' in kid) = 0),
    secret           bytea not null,
    activated_at_ms  bigint not null,
    expires_at_ms    bigint,
    check (length(secret) > 0 or expires_at_ms is not null)
);

-- At most one current key: the one without an end.
create unique index waitpoint_hmac_current on waitpoint_hmac (coalesce(expires_at_ms, 0))
    where expires_at_ms is null;

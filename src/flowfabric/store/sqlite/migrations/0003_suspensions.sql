-- backward-compatible: no
--
-- Suspensions, the waitpoints they wait at, and the signals delivered there.

create table suspension (
    sequence                       integer primary key autoincrement,
    execution_id                   text not null,
    suspension_id                  text not null,
    waitpoint_id                   text not null,
    created_at_ms                  integer not null,
    attempt_index                  integer not null,
    partition_key                  integer not null,
    reason_code                    text not null,
    requested_by                   text not null,
    resume_condition               text not null,
    resume_policy                  text not null,
    timeout_at_ms                  integer,
    timeout_behavior               text,
    continuation_metadata_pointer  text,
    last_signal_at_ms              integer,
    satisfied_at_ms                integer,
    closed_at_ms                   integer,
    close_reason                   text,
    closer_signal_id               text,
    unique (partition_key, execution_id, suspension_id)
) strict;

-- One open suspension per execution; the list of suspended executions; what is due.
create unique index suspension_open on suspension (partition_key, execution_id)
    where closed_at_ms is null;
create index suspension_listed on suspension (created_at_ms, execution_id)
    where closed_at_ms is null;
create index suspension_timeout_due on suspension (timeout_at_ms)
    where closed_at_ms is null and timeout_at_ms is not null;

create table waitpoint (
    execution_id           text not null,
    waitpoint_id           text not null,
    suspension_id          text,
    created_at_ms          integer not null,
    attempt_index          integer not null,
    ordinal                integer not null,
    signal_count           integer not null,
    matched_signal_count   integer not null,
    own_name_only          integer not null check (own_name_only in (0, 1)),
    ended_with_execution   integer not null check (ended_with_execution in (0, 1)),
    partition_key          integer not null,
    state                  text not null check (state in ('pending', 'active', 'closed')),
    waitpoint_key          text not null,
    token_kid              text not null,
    token_fingerprint      text not null,
    required_signal_names  text not null,
    activated_at_ms        integer,
    expires_at_ms          integer,
    token_expires_at_ms    integer,
    satisfied_at_ms        integer,
    closed_at_ms           integer,
    close_reason           text,
    last_signal_at_ms      integer,
    primary key (partition_key, execution_id, waitpoint_id)
) strict;

create index waitpoint_of_suspension
    on waitpoint (partition_key, execution_id, suspension_id, ordinal);
create index waitpoint_open on waitpoint (partition_key, execution_id, waitpoint_id)
    where state <> 'closed';
create index waitpoint_expiry_due on waitpoint (expires_at_ms)
    where state = 'pending' and expires_at_ms is not null;

create table signal (
    execution_id      text not null,
    signal_id         text not null,
    waitpoint_id      text not null,
    suspension_id     text,
    sequence          integer not null,
    created_at_ms     integer not null,
    accepted_at_ms    integer not null,
    partition_key     integer not null,
    matched           integer not null check (matched in (0, 1)),
    satisfier         integer not null check (satisfier in (0, 1)),
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
    payload           blob,
    primary key (partition_key, execution_id, signal_id)
) strict;

create index signal_of_suspension
    on signal (partition_key, execution_id, suspension_id, satisfier, sequence);
create index signal_kept on signal (partition_key, execution_id, sequence)
    where suspension_id is null;

create table signal_dedup (
    execution_id     text not null,
    waitpoint_id     text not null,
    signal_id        text not null,
    partition_key    integer not null,
    idempotency_key  text not null,
    expires_at_ms    integer,
    primary key (partition_key, execution_id, waitpoint_id, idempotency_key)
) strict;

create table suspend_dedup (
    execution_id        text not null,
    suspension_id       text not null,
    lease_id            text not null,
    attempt_id          text not null,
    lease_epoch         integer not null,
    lease_ttl_ms        integer not null,
    expires_at_ms       integer not null,
    attempt_index       integer not null,
    partition_key       integer not null,
    already_satisfied   integer not null check (already_satisfied in (0, 1)),
    idempotency_key     text not null,
    worker_instance_id  text not null,
    primary key (partition_key, execution_id, idempotency_key)
) strict;

create table waitpoint_hmac (
    kid              text not null primary key check (kid <> '' and instr(kid, ':') = 0),
    secret           blob not null,
    activated_at_ms  integer not null,
    expires_at_ms    integer,
    check (length(secret) > 0 or expires_at_ms is not null)
) strict;

-- At most one current key: the one without an end.
create unique index waitpoint_hmac_current on waitpoint_hmac (coalesce(expires_at_ms, 0))
    where expires_at_ms is null;

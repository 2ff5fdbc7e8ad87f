-- backward-compatible: no
--
-- What attempts emit: one stream per attempt, its frames, and its summary.

create table stream (
    partition_key        integer not null,
    execution_id         text not null,
    attempt_index        integer not null,
    attempt_id           text not null,
    created_at_ms        integer not null,
    frame_count          integer not null,
    total_bytes          integer not null,
    last_frame_id        integer not null,
    last_frame_at_ms     integer not null,
    kept_after           integer not null,
    deleted_through      integer not null,
    retention_maxlen     integer not null,
    has_durable_frame    integer not null,
    forgotten            integer not null,
    last_seq             integer,
    expires_at_ms        integer,
    ema_rate_hz          real,
    best_effort_at_ms    integer,
    maxlen_applied_last  integer,
    primary key (partition_key, execution_id, attempt_index)
) strict, without rowid;

-- Whose frames may go.
create index stream_due on stream (expires_at_ms) where expires_at_ms is not null;

create table frame (
    partition_key    integer not null,
    execution_id     text not null,
    attempt_index    integer not null,
    frame_id         integer not null,
    frame_number     integer not null,
    frame_type       text not null,
    mode             text not null,
    encoding         text not null,
    source           text not null,
    correlation_id   text,
    step_key         text,
    summary_version  integer,
    ttl_ms           integer,
    coded            integer not null,
    payload          blob not null,
    primary key (partition_key, execution_id, attempt_index, frame_id)
) strict, without rowid;

create table stream_summary (
    partition_key     integer not null,
    execution_id      text not null,
    attempt_index     integer not null,
    version           integer not null,
    patch_kind        text not null,
    first_applied_ms  integer not null,
    last_updated_ms   integer not null,
    document          blob not null,
    primary key (partition_key, execution_id, attempt_index)
) strict;

-- backward-compatible: no
--
-- What attempts emit: one stream per attempt, its frames, and its summary.

create table stream (
    execution_id         uuid not null,
    attempt_id           uuid not null,
    created_at_ms        bigint not null,
    frame_count          bigint not null,
    total_bytes          bigint not null,
    last_frame_id        bigint not null,
    last_frame_at_ms     bigint not null,
    kept_after           bigint not null,
    deleted_through      bigint not null,
    attempt_index        integer not null,
    retention_maxlen     integer not null,
    partition_key        smallint not null,
    has_durable_frame    boolean not null,
    forgotten            boolean not null,
    last_seq             bigint,
    expires_at_ms        bigint,
    ema_rate_hz          double precision,
    best_effort_at_ms    bigint,
    maxlen_applied_last  integer,
    primary key (partition_key, execution_id, attempt_index)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_threshold = 500
);

-- Whose frames may go.
create index stream_due on stream (expires_at_ms) where expires_at_ms is not null;

create table frame (
    execution_id     uuid not null,
    frame_id         bigint not null,
    frame_number     bigint not null,
    attempt_index    integer not null,
    partition_key    smallint not null,
    coded            boolean not null,
    frame_type       text not null,
    mode             text not null,
    encoding         text not null,
    source           text not null,
    payload          bytea not null,
    correlation_id   text,
    step_key         text,
    summary_version  bigint,
    ttl_ms           bigint,
    primary key (partition_key, execution_id, attempt_index, frame_id)
) with (
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500
);

create table stream_summary (
    execution_id      uuid not null,
    version           bigint not null,
    first_applied_ms  bigint not null,
    last_updated_ms   bigint not null,
    attempt_index     integer not null,
    partition_key     smallint not null,
    patch_kind        text not null,
    document          bytea not null,
    primary key (partition_key, execution_id, attempt_index)
) with (fillfactor = 70);

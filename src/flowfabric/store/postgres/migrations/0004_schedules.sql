-- backward-compatible: yes
--
-- Schedules: what to create, and when next.

create table schedule (
    namespace         text collate "C" not null,
    schedule_id       text collate "C" not null,
    schedule_kind     text not null check (schedule_kind in ('cron', 'interval')),
    expression        text not null,
    timezone          text not null,
    anchor_at_ms      bigint not null,
    catch_up          text not null check (catch_up in ('latest', 'all', 'none')),
    paused            boolean not null,
    lane_id           text not null,
    execution_kind    text not null,
    payload           bytea not null,
    payload_encoding  text,
    policy            text not null,
    priority          integer,
    tags              text not null,
    next_due_at_ms    bigint,
    last_due_at_ms    bigint,
    last_fired_at_ms  bigint,
    last_execution    text,
    fired_count       bigint not null,
    last_error        text,
    created_at_ms     bigint not null,
    updated_at_ms     bigint not null,
    primary key (namespace, schedule_id)
);

create index schedule_due on schedule (next_due_at_ms) where next_due_at_ms is not null;

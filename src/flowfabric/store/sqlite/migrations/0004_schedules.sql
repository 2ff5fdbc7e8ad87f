-- backward-compatible: yes
--
-- Schedules: what to create, and when next.

create table schedule (
    namespace         text not null,
    schedule_id       text not null,
    schedule_kind     text not null check (schedule_kind in ('cron', 'interval')),
    expression        text not null,
    timezone          text not null,
    anchor_at_ms      integer not null,
    catch_up          text not null check (catch_up in ('latest', 'all', 'none')),
    paused            integer not null check (paused in (0, 1)),
    lane_id           text not null,
    execution_kind    text not null,
    payload           blob not null,
    payload_encoding  text,
    policy            text not null,
    priority          integer,
    tags              text not null,
    next_due_at_ms    integer,
    last_due_at_ms    integer,
    last_fired_at_ms  integer,
    last_execution    text,
    fired_count       integer not null,
    last_error        text,
    created_at_ms     integer not null,
    updated_at_ms     integer not null,
    primary key (namespace, schedule_id)
) strict;

create index schedule_due on schedule (next_due_at_ms) where next_due_at_ms is not null;

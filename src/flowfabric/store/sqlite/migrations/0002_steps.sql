-- backward-compatible: no
--
-- Durable steps: what handlers have done, and which executions wait for which.

create table step (
    partition_key    integer not null,
    execution_id     text not null,
    step_key         text not null,
    after_key        text,
    kind             text not null,
    line             text not null,
    name             text not null,
    digest           text not null,
    number           integer not null,
    parallel         integer not null,
    asked_after      integer,
    position         integer,
    attempt_index    integer not null,
    recorded_at_ms   integer not null,
    wake_at_ms       integer,
    duration_ms      integer,
    result           blob,
    failure          blob,
    primary key (partition_key, execution_id, step_key)
) strict, without rowid;

create table waiter (
    partition_key  integer not null,
    execution_id   text not null,
    waiting        text not null,
    primary key (partition_key, execution_id, waiting)
) strict, without rowid;

-- What an execution waits for, or has waited for.
create index waiter_by_waiting on waiter (waiting);

create index ending_awaited_due on ending (completed_at_ms)
    where awaited;

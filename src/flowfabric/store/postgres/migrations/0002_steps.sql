-- backward-compatible: no
--
-- Durable steps: what handlers have done, and which executions wait for which.

create table step (
    partition_key    smallint not null,
    execution_id     uuid not null,
    attempt_index    int not null,
    number           int not null,
    parallel         boolean not null,
    asked_after      int,
    position         int,
    recorded_at_ms   bigint not null,
    wake_at_ms       bigint,
    duration_ms      bigint,
    kind             text not null,
    step_key         text not null,
    after_key        text,
    line             text not null,
    name             text not null,
    digest           text not null,
    result           bytea,
    failure          bytea,
    primary key (partition_key, execution_id, step_key)
);

create table waiter (
    partition_key  smallint not null,
    execution_id   uuid not null,
    waiting        text not null,
    primary key (partition_key, execution_id, waiting)
);

-- What an execution waits for, or has waited for.
create index waiter_by_waiting on waiter (waiting);

create index ending_awaited_due on ending (completed_at_ms)
    where awaited;

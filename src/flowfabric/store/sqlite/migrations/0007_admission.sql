-- backward-compatible: no
--
-- What limits claims: policies, the gates that apply them, and slots taken by hand.

create table quota_policy (
    quota_policy_id          text not null primary key,
    namespace                text not null,
    name                     text not null,
    window_ms                integer not null check (window_ms >= 0),
    max_requests_per_window  integer not null check (max_requests_per_window >= 0),
    active_concurrency_cap   integer not null check (active_concurrency_cap >= 0),
    jitter_ms                integer not null check (jitter_ms >= 0),
    while_suspended          text not null check (while_suspended in ('release', 'keep')),
    source                   text not null check (source in ('code', 'stored')),
    declared                 text,
    created_at_ms            integer not null,
    updated_at_ms            integer not null,
    constraint quota_policy_name unique (namespace, name)
) strict;

-- A policy, or a budget, and a value of its key.
create table gate (
    gate_id      text not null primary key,
    owner_kind   text not null check (owner_kind in ('quota', 'budget')),
    owner_id     text not null,
    gate_key     text not null,
    starts       text not null,
    opens_at_ms  integer,
    spare        integer check (spare > 0),
    closed       integer not null check (closed in (0, 1)),
    constraint gate_of_owner unique (owner_id, gate_key)
) strict, without rowid;

-- The gates of each route.
create table gate_route (
    gate_id   text not null,
    route_id  integer not null,
    primary key (gate_id, route_id)
) strict, without rowid;

create index gate_route_by_route on gate_route (route_id, gate_id);

create table admission (
    gate_id         text not null,
    partition_key   integer not null,
    execution_id    text not null,
    replay_count    integer not null,
    admitted_at_ms  integer not null,
    primary key (gate_id, partition_key, execution_id)
) strict, without rowid;

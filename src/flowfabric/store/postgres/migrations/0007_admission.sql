-- backward-compatible: no
--
-- What limits claims: policies, the gates that apply them, and slots taken by hand.

create table quota_policy (
    quota_policy_id          uuid primary key,
    namespace                text not null,
    name                     text not null,
    window_ms                bigint not null check (window_ms >= 0),
    max_requests_per_window  bigint not null check (max_requests_per_window >= 0),
    active_concurrency_cap   bigint not null check (active_concurrency_cap >= 0),
    jitter_ms                bigint not null check (jitter_ms >= 0),
    while_suspended          text not null check (while_suspended in ('release', 'keep')),
    source                   text not null check (source in ('code', 'stored')),
    declared                 text,
    created_at_ms            bigint not null,
    updated_at_ms            bigint not null,
    constraint quota_policy_name unique (namespace, name)
);

-- A policy, or a budget, and a value of its key. Claimers lock it.
create table gate (
    gate_id      uuid primary key,
    opens_at_ms  bigint,
    spare        bigint check (spare > 0),
    closed       boolean not null,
    owner_kind   text not null check (owner_kind in ('quota', 'budget')),
    owner_id     uuid not null,
    gate_key     text not null,
    starts       text not null,
    constraint gate_of_owner unique (owner_id, gate_key)
) with (
    fillfactor = 40,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_threshold = 500
);

-- The gates of each route.
create table gate_route (
    gate_id   uuid not null,
    route_id  integer not null,
    primary key (gate_id, route_id)
);

create index gate_route_by_route on gate_route (route_id, gate_id);

create table admission (
    gate_id         uuid not null,
    execution_id    uuid not null,
    admitted_at_ms  bigint not null,
    replay_count    integer not null,
    partition_key   smallint not null,
    primary key (gate_id, partition_key, execution_id)
);

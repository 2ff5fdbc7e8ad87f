-- backward-compatible: no
--
-- Flows: their members' dependencies, and the work that endings and cancellations leave behind.

create index live_by_flow on live (flow_id, execution_id) where flow_id is not null;
create index ending_by_flow on ending (flow_id, execution_id) where flow_id is not null;

create table flow (
    flow_id              uuid not null,
    created_at_ms        bigint not null,
    last_mutation_at_ms  bigint not null,
    graph_revision       bigint not null,
    node_count           integer not null,
    edge_count           integer not null,
    members_completed    integer not null,
    members_failed       integer not null,
    members_cancelled    integer not null,
    members_expired      integer not null,
    members_skipped      integer not null,
    members_spared       integer not null,
    partition_key        smallint not null,
    namespace            text not null,
    flow_kind            text not null,
    public_flow_state    text not null check (public_flow_state in ('open', 'cancelled')),
    derived_state        text not null,
    last_ended_at_ms     bigint,
    cancelled_at_ms      bigint,
    cancel_reason        text,
    cancellation_policy  text,
    ended_at_ms          bigint,
    member_retention_ms  bigint not null,
    member_retention_failed_ms  bigint not null,
    retain_until_ms      bigint,
    going                boolean not null default false,
    primary key (partition_key, flow_id)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

create unique index flow_by_id on flow (flow_id);
create index flow_retention_due on flow (retain_until_ms) where retain_until_ms is not null;

create table flow_tag (
    flow_id        uuid not null,
    partition_key  smallint not null,
    tag_key        text not null,
    tag_value      text not null,
    primary key (partition_key, flow_id, tag_key)
);

create table edge (
    flow_id             uuid not null,
    edge_id             uuid not null,
    upstream_id         uuid not null,
    downstream_id       uuid not null,
    created_at_ms       bigint not null,
    counts_from_replay  integer not null,
    partition_key       smallint not null,
    replaces_payload    boolean not null,
    dependency_kind     text not null,
    data_passing_ref    text not null,
    edge_state          text not null,
    dep_state           text not null,
    applied_at_ms       bigint,
    resolved_at_ms      bigint,
    resolved_outcome    text,
    -- The uuid first: a plan made while the table is tiny may search by the first column
    -- alone, and all edges of a flow are in one partition.
    primary key (flow_id, edge_id, partition_key),
    constraint edge_pair unique (upstream_id, downstream_id, partition_key)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.05
);

create index edge_by_downstream on edge (downstream_id, partition_key);
create index edge_unapplied on edge (created_at_ms) where edge_state = 'pending';

create table edge_group (
    flow_id                uuid not null,
    downstream_id          uuid not null,
    partition_key          smallint not null,
    k                      integer not null,
    staged                 integer not null,
    applied                integer not null,
    succeeded              integer not null,
    failed                 integer not null,
    skipped                integer not null,
    named_inputs           integer not null,
    policy_kind            text not null,
    on_satisfied           text not null,
    group_state            text not null,
    fired_at_ms            bigint,
    cancel_reason          text,
    prior_eligibility      text,
    prior_blocking_reason  text,
    prior_blocking_detail  text,
    primary key (partition_key, downstream_id)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05
);

create index edge_group_by_flow on edge_group (flow_id, downstream_id);

create table execution_input (
    execution_id      uuid not null,
    edge_id           uuid not null,
    resolved_at_ms    bigint not null,
    partition_key     smallint not null,
    replaces_payload  boolean not null,
    name              text not null,
    value             bytea,
    value_encoding    text,
    primary key (partition_key, execution_id, edge_id)
);

create table completion_dispatch (
    flow_id         uuid not null,
    execution_id    uuid not null,
    enqueued_at_ms  bigint not null,
    replay_count    integer not null,
    partition_key   smallint not null,
    outcome         text not null,
    primary key (partition_key, flow_id, execution_id, replay_count)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

create table pending_cancel (
    execution_id    uuid not null,
    flow_id         uuid not null,
    downstream_id   uuid,
    enqueued_at_ms  bigint not null,
    due_at_ms       bigint not null,
    attempts        integer not null default 0,
    partition_key   smallint not null,
    only_waiting    boolean not null,
    reason          text not null,
    primary key (partition_key, execution_id)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

create index pending_cancel_by_flow on pending_cancel (flow_id);
create index pending_cancel_due on pending_cancel (due_at_ms);

create table flow_audit (
    audit_id            integer primary key,
    next_flow_id        text not null,
    next_execution_id   text not null,
    after_waiter        text not null,
    due_at_ms           bigint not null
);

insert into flow_audit values
    (1, '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000000', '', 0);

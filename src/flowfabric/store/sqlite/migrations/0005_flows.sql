-- backward-compatible: no
--
-- Flows: their members' dependencies, and the work that endings and cancellations leave behind.

create index live_by_flow on live (flow_id, execution_id) where flow_id is not null;
create index ending_by_flow on ending (flow_id, execution_id) where flow_id is not null;

create table flow (
    flow_id              text not null,
    created_at_ms        integer not null,
    last_mutation_at_ms  integer not null,
    graph_revision       integer not null,
    node_count           integer not null,
    edge_count           integer not null,
    members_completed    integer not null,
    members_failed       integer not null,
    members_cancelled    integer not null,
    members_expired      integer not null,
    members_skipped      integer not null,
    members_spared       integer not null,
    partition_key        integer not null,
    namespace            text not null,
    flow_kind            text not null,
    public_flow_state    text not null check (public_flow_state in ('open', 'cancelled')),
    derived_state        text not null,
    cancelled_at_ms      integer,
    cancel_reason        text,
    cancellation_policy  text,
    last_ended_at_ms     integer,
    ended_at_ms          integer,
    member_retention_ms  integer not null,
    member_retention_failed_ms  integer not null,
    retain_until_ms      integer,
    going                integer not null default 0,
    primary key (partition_key, flow_id)
) strict, without rowid;

create unique index flow_by_id on flow (flow_id);
create index flow_retention_due on flow (retain_until_ms) where retain_until_ms is not null;

create table flow_tag (
    flow_id        text not null,
    partition_key  integer not null,
    tag_key        text not null,
    tag_value      text not null,
    primary key (partition_key, flow_id, tag_key)
) strict, without rowid;

create table edge (
    flow_id             text not null,
    edge_id             text not null,
    upstream_id         text not null,
    downstream_id       text not null,
    created_at_ms       integer not null,
    counts_from_replay  integer not null,
    partition_key       integer not null,
    replaces_payload    integer not null check (replaces_payload in (0, 1)),
    dependency_kind     text not null,
    data_passing_ref    text not null,
    edge_state          text not null,
    dep_state           text not null,
    applied_at_ms       integer,
    resolved_at_ms      integer,
    resolved_outcome    text,
    -- The uuid first: the other way round SQLite searches by the partition alone.
    primary key (flow_id, edge_id, partition_key),
    constraint edge_pair unique (upstream_id, downstream_id, partition_key)
) strict, without rowid;

create index edge_by_downstream on edge (downstream_id, partition_key);
create index edge_unapplied on edge (created_at_ms) where edge_state = 'pending';

create table edge_group (
    flow_id                text not null,
    downstream_id          text not null,
    partition_key          integer not null,
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
    fired_at_ms            integer,
    cancel_reason          text,
    prior_eligibility      text,
    prior_blocking_reason  text,
    prior_blocking_detail  text,
    primary key (partition_key, downstream_id)
) strict, without rowid;

create index edge_group_by_flow on edge_group (flow_id, downstream_id);

create table execution_input (
    execution_id      text not null,
    edge_id           text not null,
    resolved_at_ms    integer not null,
    partition_key     integer not null,
    replaces_payload  integer not null check (replaces_payload in (0, 1)),
    name              text not null,
    value             blob,
    value_encoding    text,
    primary key (execution_id, edge_id, partition_key)
) strict;

create table completion_dispatch (
    flow_id         text not null,
    execution_id    text not null,
    enqueued_at_ms  integer not null,
    replay_count    integer not null,
    partition_key   integer not null,
    outcome         text not null,
    primary key (partition_key, flow_id, execution_id, replay_count)
) strict, without rowid;

create table pending_cancel (
    execution_id    text not null,
    flow_id         text not null,
    downstream_id   text,
    enqueued_at_ms  integer not null,
    due_at_ms       integer not null,
    attempts        integer not null default 0,
    partition_key   integer not null,
    only_waiting    integer not null check (only_waiting in (0, 1)),
    reason          text not null,
    primary key (partition_key, execution_id)
) strict, without rowid;

create index pending_cancel_by_flow on pending_cancel (flow_id);
create index pending_cancel_due on pending_cancel (due_at_ms);

create table flow_audit (
    audit_id            integer primary key,
    next_flow_id        text not null,
    next_execution_id   text not null,
    after_waiter        text not null,
    due_at_ms           integer not null
) strict;

insert into flow_audit values
    (1, '00000000-0000-0000-0000-000000000000', '00000000-0000-0000-0000-000000000000', '', 0);

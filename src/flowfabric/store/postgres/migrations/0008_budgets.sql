-- backward-compatible: yes
--
-- Budgets: what may be spent, what was, and what is promised to work under way.

-- All that a budget counts is in its row, which every report to it updates: limits, usage and
-- reservations are JSON objects of amounts by dimension.
create table budget (
    budget_id          uuid primary key,
    namespace          text collate "C" not null,
    name               text collate "C" not null,
    declared           boolean not null,
    scope_type         text not null,
    scope_id           text not null,
    enforcement_mode   text not null check (enforcement_mode in ('strict', 'warn')),
    on_hard_limit      text not null,
    on_soft_limit      text not null,
    reset_interval_ms  bigint not null,
    hard_limits        text not null,
    soft_limits        text not null,
    usage              text not null,
    reserved           text not null,
    wanted             text not null,
    closed             boolean not null,
    breach_count       bigint not null,
    soft_breach_count  bigint not null,
    last_breach_at_ms  bigint,
    last_breach_dim    text,
    reset_count        bigint not null,
    last_reset_at_ms   bigint,
    next_reset_at_ms   bigint,
    act_at_ms          bigint,
    created_at_ms      bigint not null,
    updated_at_ms      bigint not null
) with (fillfactor = 50);

create index budget_by_name on budget (namespace, name);
-- Those for whole lanes, kinds and namespaces, for transactions that add a route.
create index budget_by_scope on budget (scope_type, scope_id)
    where scope_type in ('lane', 'kind', 'namespace');
create index budget_reset_due on budget (next_reset_at_ms) where next_reset_at_ms is not null;
create index budget_action_due on budget (act_at_ms) where act_at_ms is not null;

-- What executions have spent and can give back.
create table budget_spend (
    budget_id      uuid not null,
    partition_key  smallint not null,
    execution_id   uuid not null,
    amounts        text not null,
    period         bigint not null,
    keep_until_ms  bigint not null,
    primary key (budget_id, partition_key, execution_id)
) with (fillfactor = 70);

create index budget_spend_due on budget_spend (keep_until_ms);

-- Reports that were applied, by their keys.
create table budget_report (
    budget_id      uuid not null,
    settles        boolean not null,
    dedup_key      text not null,
    outcome        text not null,
    partition_key  smallint not null,
    execution_id   uuid,
    lease_id       uuid,
    applied_at_ms  bigint not null,
    keep_until_ms  bigint not null,
    primary key (budget_id, settles, dedup_key)
);

create index budget_report_due on budget_report (keep_until_ms);

-- Amounts promised to attempts; each counts as long as its lease is live. Where `waits`, there was
-- no room, and an attempt waits for the amount.
create table budget_reservation (
    budget_id       uuid not null,
    reservation_id  text not null,
    partition_key   smallint not null,
    execution_id    uuid not null,
    lease_id        uuid not null,
    waits           boolean not null,
    amounts         text not null,
    created_at_ms   bigint not null,
    check_at_ms     bigint not null,
    primary key (budget_id, reservation_id)
);

create index budget_reservation_due on budget_reservation (check_at_ms);

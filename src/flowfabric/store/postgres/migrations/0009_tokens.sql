-- backward-compatible: yes
--
-- Who may ask a server for what. Secrets are kept as digests.

create table api_token (
    token_id       text primary key,
    name           text not null,
    digest         bytea not null,
    scopes         text not null,
    namespace      text,
    created_at_ms  bigint not null,
    expires_at_ms  bigint,
    revoked_at_ms  bigint
);

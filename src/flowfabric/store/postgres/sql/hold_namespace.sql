-- Keep routes of a namespace from being added until the transaction ends, once those that are being
-- added are there. See `intern_routes`.
select pg_advisory_xact_lock(hashtextextended('routes of ' || :namespace::text, 0));

-- What an append asks of the given executions, and the time. No attempt ends meanwhile.
with locked as materialized (
    -- Shared, as for steps: a lease may not be taken away while its frames are stored.
    select e.partition_key, e.execution_id::text as execution_id,
           e.lifecycle_phase::text as lifecycle_phase,
           e.ownership_state::text as ownership_state, e.lease_id::text as lease_id,
           coalesce(e.lease_epoch, 0) as lease_epoch, e.lease_expires_at_ms,
           coalesce(e.current_attempt_index, 0) as current_attempt_index
      from unnest(:partition_keys::int[], :execution_ids::uuid[])
        as k (partition_key, execution_id)
      join live e on e.partition_key = k.partition_key and e.execution_id = k.execution_id
     order by e.partition_key, e.execution_id
       for share of e
)
select locked.*,
       -- Reading `locked` first: the time of a decision is taken after its locks.
       coalesce(:clock::bigint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
           as now_ms
  from locked
 cross join (select count(*) from locked) as after_locking;

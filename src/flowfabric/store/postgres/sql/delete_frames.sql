-- Delete the frames of the given streams up to a number of each.
with kept as materialized (
    -- The numbers grow with the ids, which the key has in order: the first one kept is near.
    select k.*, coalesce(first.frame_id, 9223372036854775807) as from_id
      from unnest(
          :partition_keys::int[], :execution_ids::uuid[], :attempt_indexes::int[],
          :throughs::bigint[]) as k (partition_key, execution_id, attempt_index, through)
      left join lateral (
        select f.frame_id
          from frame f
         where f.partition_key = k.partition_key
           and f.execution_id = k.execution_id
           and f.attempt_index = k.attempt_index
           and f.frame_number > k.through
         order by f.frame_id
         limit 1) as first on true
), gone as (
    delete from frame f using kept k
     where f.partition_key = k.partition_key
       and f.execution_id = k.execution_id
       and f.attempt_index = k.attempt_index
       and f.frame_id < k.from_id
    returning 1
)
select count(*) as trimmed from gone;

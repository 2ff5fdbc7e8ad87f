-- The edges that exist between the given pairs.
select edge.*
  from json_each(:rows)
 cross join edge on edge.partition_key = :partition_key
                and edge.upstream_id = value ->> 'upstream_ids'
                and edge.downstream_id = value ->> 'downstream_ids';

-- The gates of a policy or a budget, by key, after one.
select *
  from gate
 where owner_id = :owner_id
   and (cast(:after as text) is null or gate_key > :after)
 order by gate_key
 limit :limit;

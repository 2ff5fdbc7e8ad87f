-- Workers that were silent for too long.
select *
  from worker
 where expires_at_ms <= :now_ms
 order by expires_at_ms
 limit :limit
   for update skip locked;

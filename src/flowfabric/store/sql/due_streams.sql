-- Streams whose frames may go, longest due first; who appends to one just now keeps it.
select *
  from stream
 where expires_at_ms is not null
   and expires_at_ms <= :now_ms
 order by expires_at_ms
 limit :limit
   for update skip locked;

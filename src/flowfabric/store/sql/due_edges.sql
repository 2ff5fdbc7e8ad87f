-- Edges that were staged before a time and have not been applied, oldest first.
select *
  from edge
 where edge_state = 'pending'
   and created_at_ms <= :before_ms
 order by created_at_ms
 limit :limit;

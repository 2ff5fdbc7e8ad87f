-- Forget until when the windows of a policy are full: its limits have changed.
update gate
   set opens_at_ms = null
 where owner_id = :owner_id
   and opens_at_ms is not null;

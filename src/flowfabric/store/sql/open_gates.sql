-- Forget until when the windows of a policy are full, and what it has to spare: its limits have changed.
update gate
   set opens_at_ms = null, spare = null
 where owner_id = :owner_id
   and (opens_at_ms is not null or spare is not null);

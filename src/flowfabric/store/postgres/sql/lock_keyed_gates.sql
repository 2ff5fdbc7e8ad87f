-- The gates of the given routes for a value of a key, locked; those that others hold are left out.
select gate_id::text as gate_id
  from gate
 where gate_id = any(array(
        select gate_id from gate_route where route_id = any(:route_ids::integer[])))
   and owner_kind = 'quota'
   and gate_key <> ''
 order by gate_id
   for update skip locked;

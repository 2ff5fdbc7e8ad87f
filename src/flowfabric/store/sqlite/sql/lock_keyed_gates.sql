-- The gates of the given routes for a value of a key.
select gate_id
  from gate
 where gate_id in (
        select gate_id from gate_route
         where route_id in (select value from json_each(:route_ids)))
   and owner_kind = 'quota'
   and gate_key <> ''
 order by gate_id;

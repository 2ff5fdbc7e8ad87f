-- Those of the given gates that are there. They stay until the transaction ends.
select gate_id::text as gate_id
  from gate
 where gate_id = any(:gate_ids::uuid[])
 order by gate_id
   for key share;

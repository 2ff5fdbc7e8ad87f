-- Those of the given gates that are there.
select gate_id
  from gate
 where gate_id in (select value from json_each(:gate_ids))
 order by gate_id;

-- Delete those of the given gates that no route passes and nobody holds by hand.
delete from gate
 where gate_id in (select value from json_each(:gate_ids))
   and not exists (select 1 from gate_route where gate_route.gate_id = gate.gate_id)
   and not exists (select 1 from admission where admission.gate_id = gate.gate_id);

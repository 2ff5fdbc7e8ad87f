-- Delete those of the given gates that no route passes and nobody holds by hand. Lock them by a
-- statement of its own before: who has registered a route meanwhile is seen by this one.
delete from gate
 where gate_id = any(:gate_ids::uuid[])
   and not exists (select from gate_route where gate_route.gate_id = gate.gate_id)
   and not exists (select from admission where admission.gate_id = gate.gate_id);

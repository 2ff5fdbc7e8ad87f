-- Reservations of the given budgets whose attempts no longer hold a live lease.
select r.*
  from budget_reservation as r
  left join lateral (
    select l.lease_id
      from live as l
     where l.partition_key = r.partition_key
       and l.execution_id = r.execution_id
       and l.lease_id = r.lease_id
       and l.ownership_state = 'leased'
       and l.lease_expires_at_ms > :now_ms::bigint
     limit 1
  ) as holder on true
 where r.budget_id = any(:budget_ids::uuid[])
   and holder.lease_id is null
   and not r.waits;

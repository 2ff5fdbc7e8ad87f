-- Reservations of the given budgets whose attempts no longer hold a live lease.
select r.*
  from json_each(:budget_ids) as k
 cross join budget_reservation as r on r.budget_id = k.value
 where not r.waits
   and not exists (
    select 1
      from live as l
     where l.execution_rowid = (
                select x.execution_rowid from execution x
                 where x.partition_key = r.partition_key and x.execution_id = r.execution_id)
       and l.lease_id = r.lease_id
       and l.ownership_state = 'leased'
       and l.lease_expires_at_ms > :now_ms);

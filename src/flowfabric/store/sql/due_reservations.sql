-- Reservations that are to be looked at.
select *
  from budget_reservation
 where check_at_ms <= :now_ms
 order by check_at_ms
 limit :limit;

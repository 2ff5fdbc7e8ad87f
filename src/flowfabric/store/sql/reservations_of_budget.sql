-- One of the amounts of a budget that running attempts hold, if there is any.
select *
  from budget_reservation
 where budget_id = :budget_id
 limit 1;

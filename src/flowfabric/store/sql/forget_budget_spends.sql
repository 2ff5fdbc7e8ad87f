-- Spends of a budget that is removed.
delete from budget_spend
 where budget_id = :budget_id;

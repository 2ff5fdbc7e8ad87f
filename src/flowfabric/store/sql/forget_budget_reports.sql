-- Reports of a budget that is removed.
delete from budget_report
 where budget_id = :budget_id;

-- Budgets by namespace and name, after one; of one namespace or of all.
select *
  from budget
 where (namespace, name) > (:after_namespace, :after_name)
   and (cast(:namespace as text) is null or namespace = :namespace)
 order by namespace, name
 limit :limit;

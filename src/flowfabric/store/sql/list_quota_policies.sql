-- Policies by namespace and name, after one.
select *
  from quota_policy
 where (cast(:namespace as text) is null or namespace = :namespace)
   and (namespace, name) > (:after_namespace, :after_name)
 order by namespace, name
 limit :limit;

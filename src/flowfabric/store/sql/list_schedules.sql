-- Schedules by namespace and name, after one; of one namespace or of all.
select *
  from schedule
 where (namespace, schedule_id) > (:after_namespace, :after_name)
   and (cast(:namespace as text) is null or namespace = :namespace)
 order by namespace, schedule_id
 limit :limit;

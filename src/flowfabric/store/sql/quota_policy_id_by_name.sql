-- The id of a policy that people know by its name.
select quota_policy_id
  from quota_policy
 where namespace = :namespace
   and name = :called;

-- Every namespace in which something was ever submitted and not forgotten.
select distinct namespace
  from route
 order by namespace;

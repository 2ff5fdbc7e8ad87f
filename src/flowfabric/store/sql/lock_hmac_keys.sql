-- Locked to change the keys, also while there is none to lock.
select 1 as held
  from deployment
   for update;

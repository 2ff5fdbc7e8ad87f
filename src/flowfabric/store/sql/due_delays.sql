-- Delayed executions whose time has come.
select partition_key, execution_id
  from live
 where eligibility_state = 'not_eligible_until_time'
   and delay_until_ms <= :now_ms
-- within live
 order by delay_until_ms
 limit :limit
   for update skip locked;

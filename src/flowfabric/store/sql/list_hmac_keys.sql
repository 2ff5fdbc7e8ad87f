-- Every key that signs waitpoint tokens, or may still verify them.
select *
  from waitpoint_hmac
 where length(secret) > 0
 order by activated_at_ms, kid;

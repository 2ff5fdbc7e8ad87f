-- Every key that signs or once signed waitpoint tokens.
select *
  from waitpoint_hmac
 order by activated_at_ms, kid;

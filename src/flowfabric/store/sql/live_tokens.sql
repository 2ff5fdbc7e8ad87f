-- One token that lets its bearer in, if there is any.
select token_id
  from api_token
 where revoked_at_ms is null
   and (expires_at_ms is null or expires_at_ms > :now_ms)
 limit 1;

-- API tokens by id, after one.
select *
  from api_token
 where token_id > :after
 order by token_id
 limit :limit;

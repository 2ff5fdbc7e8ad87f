-- How many members of a flow are in which state.
select public_state, count(*) as members
  from execution
 where flow_id = :flow_id
 group by public_state;

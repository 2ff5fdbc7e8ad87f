-- How many members of a flow are in which state, and how many of them a join gave up.
select public_state, count(*) as members,
       count(*) filter (where cancellation_reason in (:satisfied, :impossible)) as spared
  from flow_member
 where flow_id = :flow_id
 group by public_state;

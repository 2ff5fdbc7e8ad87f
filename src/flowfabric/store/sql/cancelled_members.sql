-- Members of a cancelled flow that were cancelled with it or since, or are about to be, and how
-- many they are; those that a join gave up are not among them.
select partition_key, execution_id, count(*) over () as member_count
  from flow_member
 where flow_id = :flow_id
   and ((lifecycle_phase <> 'terminal' and cancel_requested)
        or (public_state = 'cancelled'
            and completed_at_ms >= :cancelled_at_ms
            and cancellation_reason not in (:satisfied, :impossible, :short_join)))
 order by execution_id
 limit :limit;

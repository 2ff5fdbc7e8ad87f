-- Whether a worker serves any route under limits.
select exists (
           select from route
            where execution_kind = any(:kinds::text[])
              and lane_id = any(:lanes::text[])
              and gated)
       or (:kinds::text[] is null
           and exists (select from route where lane_id = any(:lanes::text[]) and gated)) as found;

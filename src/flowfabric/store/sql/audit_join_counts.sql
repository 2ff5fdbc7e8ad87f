-- Joins of a page of flows, those with counts that differ from their edges'.
select g.partition_key, g.downstream_id as execution_id
  from (select *
          from flow
         where flow_id >= :start
         order by flow_id
         limit :limit) f
  join edge_group g on g.flow_id = f.flow_id
 where not f.going
   and (g.staged, g.applied, g.succeeded, g.failed, g.skipped) <> (
        select count(*), count(*) filter (where e.edge_state = 'applied'),
               count(*) filter (where e.dep_state = 'satisfied'),
               count(*) filter (
                    where e.dep_state = 'impossible' and e.resolved_outcome <> 'skipped'),
               count(*) filter (
                    where e.dep_state = 'impossible' and e.resolved_outcome = 'skipped')
          from edge e
         where e.partition_key = g.partition_key and e.downstream_id = g.downstream_id)
 order by g.downstream_id;

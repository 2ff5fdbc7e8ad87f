-- Rows of some partitions that belong to executions or flows which are gone; some of each kind.
select * from (
    select 'attempt' as belongings, t.partition_key, t.execution_id as execution_id
      from attempt t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as attempt_strays
union all
select * from (
    select 'execution_tag' as belongings, t.partition_key, t.execution_id as execution_id
      from execution_tag t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as execution_tag_strays
union all
select * from (
    select 'claim_grant' as belongings, t.partition_key, t.execution_id as execution_id
      from claim_grant t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as claim_grant_strays
union all
select * from (
    select 'step' as belongings, t.partition_key, t.execution_id as execution_id
      from step t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as step_strays
union all
select * from (
    select 'waiter' as belongings, t.partition_key, t.execution_id as execution_id
      from waiter t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as waiter_strays
union all
select * from (
    select 'suspension' as belongings, t.partition_key, t.execution_id as execution_id
      from suspension t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as suspension_strays
union all
select * from (
    select 'waitpoint' as belongings, t.partition_key, t.execution_id as execution_id
      from waitpoint t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as waitpoint_strays
union all
select * from (
    select 'signal' as belongings, t.partition_key, t.execution_id as execution_id
      from signal t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as signal_strays
union all
select * from (
    select 'signal_dedup' as belongings, t.partition_key, t.execution_id as execution_id
      from signal_dedup t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as signal_dedup_strays
union all
select * from (
    select 'suspend_dedup' as belongings, t.partition_key, t.execution_id as execution_id
      from suspend_dedup t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as suspend_dedup_strays
union all
select * from (
    select 'execution_input' as belongings, t.partition_key, t.execution_id as execution_id
      from execution_input t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as execution_input_strays
union all
select * from (
    select 'edge_group' as belongings, t.partition_key, t.downstream_id as execution_id
      from edge_group t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.downstream_id)
     limit :limit) as edge_group_strays
union all
select * from (
    select 'pending_cancel' as belongings, t.partition_key, t.execution_id as execution_id
      from pending_cancel t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as pending_cancel_strays
union all
select * from (
    select 'completion_dispatch' as belongings, t.partition_key, t.execution_id as execution_id
      from completion_dispatch t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from execution e
             where e.partition_key = t.partition_key and e.execution_id = t.execution_id)
     limit :limit) as completion_dispatch_strays
union all
select * from (
    select 'edge' as belongings, t.partition_key, t.upstream_id as execution_id
      from edge t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from flow f
             where f.partition_key = t.partition_key and f.flow_id = t.flow_id)
     limit :limit) as edge_strays
union all
select * from (
    select 'flow_tag' as belongings, t.partition_key, t.flow_id as execution_id
      from flow_tag t
     where t.partition_key between :first_partition and :last_partition
       and not exists (
            select 1 from flow f
             where f.partition_key = t.partition_key and f.flow_id = t.flow_id)
     limit :limit) as flow_tag_strays;

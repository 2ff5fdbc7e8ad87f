-- Those of the given executions that no other transaction has locked; they are locked now.
with given as materialized (
    select *
      from unnest(:partition_keys::int[], :execution_ids::uuid[])
               as w (partition_key, execution_id)
)
select *
  from (select e.partition_key, e.execution_id
          from given w
          join live e on e.partition_key = w.partition_key and e.execution_id = w.execution_id
           for update of e skip locked) as going_on
union all
select *
  from (select e.partition_key, e.execution_id
          from given w
          join ending e on e.partition_key = w.partition_key and e.execution_id = w.execution_id
           for update of e skip locked) as ended;

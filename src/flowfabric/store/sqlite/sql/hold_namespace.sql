-- Nothing to do: writers take turns.
select :namespace as held;

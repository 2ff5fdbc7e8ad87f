"""The rules: pure functions from rows, a request and a time to a decision."""

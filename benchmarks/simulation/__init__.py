"""Whole systems in one process, by a virtual clock, under faults that a seed chooses."""

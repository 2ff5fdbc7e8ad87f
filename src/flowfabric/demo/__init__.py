"""A demonstration: `python -m flowfabric.demo`."""

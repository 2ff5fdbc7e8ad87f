"""The command `flowfabric`."""

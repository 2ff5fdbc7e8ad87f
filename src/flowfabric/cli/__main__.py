"""`python -m flowfabric.cli`."""

from flowfabric.cli.main import main

main()

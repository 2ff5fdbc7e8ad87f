"""The console script `flowfabric`.

It stands outside the package: importing that takes long enough for Ctrl-C to arrive
meanwhile, which ends the command without a traceback, as at any later time.
"""

import sys


def main() -> None:
    try:
        from flowfabric.cli.main import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))

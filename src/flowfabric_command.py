"""The console script `flowfabric`.

It stands outside the package, whose import takes long enough for somebody to change
their mind: Ctrl-C ends it without a word then, as at any later time.
"""

import sys


def main() -> None:
    try:
        from flowfabric.cli.main import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))

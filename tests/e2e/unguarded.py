"""A program that starts a worker wherever it is imported.

    python -m tests.e2e.unguarded URL

Its tasks run in processes of their own, which import it.
"""

import asyncio
import sys

from flowfabric import App
from tests.worker import processes

app = App(sys.argv[1])
app.adopt(processes.app)
asyncio.run(app.run_worker())

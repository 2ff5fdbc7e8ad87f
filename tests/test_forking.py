"""The process that forks commands for other tests outlives whatever its children do."""

import os
from pathlib import Path

from tests.forking import Forker, Request

AT_ONCE = 40


def test_processes_that_end_at_once_are_all_told_of(tmp_path: Path) -> None:
    forker = Forker("json", environment=dict(os.environ))
    nowhere = os.open(os.devnull, os.O_RDWR)
    request = Request("this", (), str(tmp_path), {})
    for _ in range(3):
        started = [forker.fork(request, (nowhere, nowhere, nowhere)) for _ in range(AT_ONCE)]
        assert [each.wait(60) for each in started] == [0] * AT_ONCE
    os.close(nowhere)
    forker.close()

"""Processes that start at once: forked from one that has imported the package already.

Importing the command takes longer than most commands do, so a test that runs ten of them
would mostly import. What is forked is a process of its own all the same: it has its own
arguments, directory, variables and standard streams, runs the module as `python -m` does,
and ends as Python does.

    python tests/forking.py CHANNEL MODULE...

serves requests that arrive on the descriptor CHANNEL, with the modules imported.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NUMBER = struct.Struct("i")
STREAMS = 3


class Request(NamedTuple):
    """What to run, and where. The descriptors of the streams travel beside it."""

    module: str
    arguments: Sequence[str]
    cwd: str
    environment: Mapping[str, str]


class Forked:
    """A process that was forked for us; our own child is the one that forked it."""

    def __init__(self, pid: int, reply: int) -> None:
        self.returncode: int | None = None
        self._pid = pid
        self._reply = reply

    def fileno(self) -> int:
        """Readable once it has ended, until somebody has asked for its status."""
        return self._reply

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit status once it has ended, or the signal that ended it as a negative number."""
        return self._look(0)

    def wait(self, timeout_s: float) -> int:
        status = self._look(timeout_s)
        if status is None:
            raise TimeoutError(f"process {self._pid} goes on after {timeout_s} s")
        return status

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._reply], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(_number(self._reply))
            os.close(self._reply)
        return self.returncode


class Forker:
    """A process that has imported `modules`, and forks others."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        atexit.register(self.close)

    def fork(self, request: Request, streams: tuple[int, int, int]) -> Forked:
        reply, theirs = os.pipe()
        message = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._channel, [NUMBER.pack(len(message))], [*streams, theirs])
            self._channel.sendall(message)
        os.close(theirs)
        return Forked(_number(reply), reply)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


def _number(descriptor: int) -> int:
    data = os.read(descriptor, NUMBER.size)
    assert data, "the process that forks has ended"
    number: int = NUMBER.unpack(data)[0]
    return number


# The process that forks -----------------------------------------------------


def serve(channel: socket.socket) -> Request | None:
    """Fork a process for every request. Return its request there, and None here at the end."""
    replies: dict[int, int] = {}
    # Children are reaped by the loop alone. A handler that reaps could be interrupted by the end of
    # another child, and ask for one that is already gone.
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, select.PIPE_BUF)
            _reap(replies)
        if channel.fileno() not in ready:
            continue
        length, descriptors, _, _ = socket.recv_fds(channel, NUMBER.size, STREAMS + 1)
        if not length:
            return None
        message = channel.recv(NUMBER.unpack(length)[0], socket.MSG_WAITALL)
        *streams, reply = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            channel.close()
            for each in (ended, wake, reply, *replies.values()):
                os.close(each)
            _begin(streams)
            return Request(*json.loads(message))
        replies[pid] = reply
        os.write(reply, NUMBER.pack(pid))
        for each in streams:
            os.close(each)


def _reap(replies: dict[int, int]) -> None:
    """Tell of the processes that have ended."""
    for pid, reply in list(replies.items()):
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            del replies[pid]
            os.write(reply, NUMBER.pack(status))
            os.close(reply)


def _begin(streams: Sequence[int]) -> None:
    """Have what a process has when it starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    # As on a start: by lines on a terminal, by blocks elsewhere, and by lines for errors.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def become(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.cwd)
    sys.path[0] = request.cwd
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def main() -> None:
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # What is never collected is never copied.
    gc.freeze()
    # Whoever interrupts the tests closes the channel, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()

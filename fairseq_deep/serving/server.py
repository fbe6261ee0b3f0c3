"""Start and stop of the server: uvicorn, a bound socket, and signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from fairseq_deep.errors import UsageError

from .service import JsonLog, log

HEAD_SECONDS = 10.0
"""Time limit for the head of a request, from the connection or the last answer; it is checked once per second."""
STOP_SECONDS = 5.0
"""Additional time after a request's time limit to send answers at shutdown."""
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; connections are queued until :func:`run_server` accepts them.

    Raises:
        UsageError: the address is unknown or in use
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0].lower()
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


def run_server(app: Any, bound: socket.socket, timeout: float) -> int:
    """Serve until SIGTERM or SIGINT; then stop accepting connections and finish the accepted requests.

    A second signal stops the server immediately.

    Args:
        timeout: time limit of a request, in seconds

    Returns:
        the exit status: 0 after all requests are answered, or 128 + the number of the second signal
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in ("uvicorn", "asyncio"):  # asyncio reports, for example, that the limit of open files is reached
        logging.getLogger(name).addHandler(JsonLog(logging.WARNING))
        logging.getLogger(name).propagate = False
    config = uvicorn.Config(
        app, http="h11", ws="none", loop="asyncio", lifespan="on", log_config=None, access_log=False,
        log_level="warning", proxy_headers=False, server_header=False, backlog=BACKLOG,
        timeout_graceful_shutdown=int(timeout + STOP_SECONDS),
    )  # fmt: skip
    server = _Server(config)
    server.run(sockets=[bound])
    return 128 + server.signals[-1] if server.force_exit else 0


class _Server(uvicorn.Server):
    """Server that logs start and stop; unlike uvicorn's, it does not raise the signal again at the end."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.signals: list[int] = []
        self.idle: dict[tuple[Any, Any], float] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.signals.append(sig)
        self.force_exit = self.should_exit
        self.should_exit = True
        for connection in list(self.server_state.connections) if self.force_exit else ():
            connection.transport.abort()  # asyncio of Python 3.12 and newer waits for the open ones
        log("stopping", signal=signal.Signals(sig).name, at_once=self.force_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        log("ready", url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", process=os.getpid())

    async def on_tick(self, counter: int) -> bool:
        """Once per second, close connections with a late request head; uvicorn has no limit."""
        if counter % 10 == 0:
            connections, now = self.server_state.connections, time.monotonic()
            found = ((each, each.cycle) for each in connections if each.cycle is None or each.cycle.response_complete)
            self.idle = {key: self.idle.get(key, now) for key in found}  # by connection and last request
            for (connection, _), since in self.idle.items():
                if now - since > HEAD_SECONDS:
                    connection.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        log("stopped", at_once=self.force_exit)

"""A server that is a proxy's admin API and an engine's ``/health`` at once, over real HTTP."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.runtime.builders import DEADLINE_SECONDS

REGISTERED = (200, b'{"registered":true}')


class Asked(NamedTuple):
    """One request to the admin API."""

    method: str
    path: str
    token: str | None
    body: Any


class FakeProxy:
    """Answers with ``answer`` and ``health``, a status and a body each; not before ``may_answer`` is set."""

    def __init__(self) -> None:
        self.asked: queue.Queue[Asked] = queue.Queue()
        self.answer: tuple[int, bytes] = REGISTERED
        self.answer_headers: dict[str, str] = {}
        self.health: tuple[int, bytes] = (200, b"")
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = ""

    def next(self) -> Asked:
        """The next request to the admin API, for which it waits. Raises queue.Empty."""
        return self.asked.get(timeout=DEADLINE_SECONDS)

    def asked_so_far(self) -> list[Asked]:
        """The requests that nobody has looked at."""
        found = []
        while not self.asked.empty():
            found.append(self.asked.get_nowait())
        return found


@contextmanager
def fake_proxy() -> Iterator[FakeProxy]:
    """A fake proxy that listens."""
    proxy = FakeProxy()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            headers: dict[str, str] = {}
            if self.path == "/health":
                status, body = proxy.health
            else:
                length = int(self.headers.get("Content-Length") or 0)
                content = json.loads(self.rfile.read(length) or b"null")
                proxy.asked.put(Asked(self.command, self.path, self.headers.get("Authorization"), content))
                proxy.may_answer.wait(DEADLINE_SECONDS)
                (status, body), headers = proxy.answer, proxy.answer_headers
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - the library's names

        def handle(self) -> None:
            # Whoever asked may not have waited for the answer.
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()

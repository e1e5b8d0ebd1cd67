"""An HTTP server with scripted answers, as a running node gives them: for the commands that look at nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Script:
    """Answers by path: JSON, bytes as they are, (status, answer), a function, or a list of answers in their order."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []

    def answer(self, path: str) -> Any:
        self.asked.append(path)
        found = self.answers.get(path.partition("?")[0])
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found() if callable(found) else found


@contextmanager
def site(**answers: Any) -> Iterator[Script]:
    """Serve; `why={...}` answers `/why`."""
    script = Script()
    script.answers = {f"/{name}": value for name, value in answers.items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = script.answer(self.path)
            status = 404 if found is None else 200
            if isinstance(found, tuple):
                status, found = found
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.block_on_close = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

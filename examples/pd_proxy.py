"""A small router for prefill and decode servers: ``vllm serve`` on both sides, standard library only.

    python examples/pd_proxy.py --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 --port 8000

Each completion goes to a prefill server first, for one token and with the wish that its KV be kept; what that server
returns as ``kv_transfer_params`` goes to a decode server with the request as it came. Servers are taken in turn. It
knows no health checks, retries or load: an example, and enough for tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT = 600.0
MAX_BODY = 64 << 20
PATHS = ("/v1/completions", "/v1/chat/completions")


class Turn:
    """Takes servers in turn, from any thread."""

    def __init__(self, urls: list[str]) -> None:
        self._next: Iterator[str] = itertools.cycle([url.rstrip("/") for url in urls])
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            return next(self._next)


def send(url: str, body: dict[str, Any]) -> HTTPResponse:
    """POST; raises HTTPError for what the server refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    return response


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, one token of it, and the KV kept for whoever comes with what is returned."""
    one = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    for name in ("stream_options", "min_tokens"):
        one.pop(name, None)
    if "max_completion_tokens" in one:
        one["max_completion_tokens"] = 1
    return one


class Proxy(BaseHTTPRequestHandler):
    """One request. ``prefill`` and ``decode`` are set by :func:`main`."""

    prefill: Turn
    decode: Turn
    protocol_version = "HTTP/1.0"  # an answer ends with its connection, streamed or not

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path not in PATHS or not length.isdigit() or int(length) > MAX_BODY:
            self.send_error(404 if self.path not in PATHS else 413)
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            if not isinstance(body, dict):
                raise TypeError("expected an object")
        except (ValueError, TypeError) as err:
            self.send_error(400, str(err))
            return
        try:
            self._relay(body)
        except urllib.error.HTTPError as err:
            with err:
                self._answer(err.code, err.headers.get("Content-Type", "application/json"), [err.read()])
        except OSError as err:
            self.send_error(502, str(err))

    def _relay(self, body: dict[str, Any]) -> None:
        with send(self.prefill() + self.path, for_prefill(body)) as first:
            params = json.load(first).get("kv_transfer_params")
        if params:
            body["kv_transfer_params"] = params
        with send(self.decode() + self.path, body) as second:
            self._answer(second.status, second.headers["Content-Type"], iter(lambda: second.read1(1 << 16), b""))

    def _answer(self, status: int, kind: str, parts: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the servers log."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, help="a prefill server; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="a decode server; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    Proxy.prefill, Proxy.decode = Turn(given.prefill), Turn(given.decode)
    with ThreadingHTTPServer((given.host, given.port), Proxy) as server:
        print(f"listening on http://{given.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

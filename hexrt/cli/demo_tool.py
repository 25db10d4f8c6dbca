"""The HTTP tool that the demo's agents call: tells how easy a text is to read.

Owns a small server on 127.0.0.1 in threads of its own, from `__enter__` to `__exit__`. For the demo only: no rights are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

MAX_BODY_BYTES = 64 * 1024
WORDS_A_MINUTE = 230


def readability(text: str) -> dict[str, float]:
    """Counts of words and sentences, the reading time, and Flesch's reading ease (Flesch 1948), with vowel groups as syllables."""
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d[\d.,]*", text)
    sentences = max(1, len(re.findall(r"[.!?]+(?:\s|$)", text)))
    syllables = sum(max(1, len(re.findall(r"[aeiouy]+", word.lower()))) for word in words)
    ease = 206.835 - 1.015 * len(words) / sentences - 84.6 * syllables / max(1, len(words))
    seconds = len(words) * 60 / WORDS_A_MINUTE
    return {"words": len(words), "sentences": sentences, "seconds": round(seconds, 1), "ease": round(ease, 1)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != "/readability":
            self._answer(404, {"error": "there is only POST /readability"})
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(413, {"error": f"send at most {MAX_BODY_BYTES} bytes, and say how many"})
        else:
            try:
                text = json.loads(self.rfile.read(int(length)))["text"]
                self._answer(200, readability(str(text)))
            except (ValueError, TypeError, KeyError, RecursionError):
                self._answer(400, {"error": 'send {"text": "..."}'})

    def _answer(self, status: int, content: Mapping[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the demo's own view shows the calls."""


class LocalTool:
    """`with LocalTool() as tool: tool.url`."""

    def __enter__(self) -> LocalTool:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, name="demo-tool", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/readability"

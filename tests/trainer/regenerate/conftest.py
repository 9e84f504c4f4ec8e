"""A small real server of chat completions, and inputs for it."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainer.regenerate.options import Options, Sampling

Answer = tuple[int, dict[str, str], Any]  # status, headers, document
Body = dict[str, Any]


def completion(
    content: Any, *, finish: str = "stop", num_tokens: int = 3, **message: Any
) -> Answer:
    """Return a 200 answer as vLLM and SGLang give it."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": content} | message,
    }
    usage = {"completion_tokens": num_tokens}
    return 200, {}, {"object": "chat.completion", "choices": [choice], "usage": usage}


def error(status: int, text: str, **headers: str) -> Answer:
    """Return a refusal with an OpenAI error document."""
    return status, headers, {"error": {"message": text, "code": status}}


def echo(body: Body) -> Answer:
    """Answer deterministically, as greedy decoding does: from all that was said before."""
    said = " / ".join(m["content"] for m in body["messages"] if m["role"] != "assistant")
    return completion(f"answer {len(body['messages'])} to {said} ✓")


CUT = "cut the connection"


@dataclass
class ChatServer:
    """What the server does is ``answer``; what it saw is in ``asked``, in order.

    answer gets the body and how often the same messages were asked before; CUT closes the
    connection without a word.
    """

    answer: Callable[[Body, int], Answer | str] = lambda body, _times: echo(body)
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "tiny", "root": "/models/tiny", "max_model_len": 64}]
    )
    models_status: int = 200
    version: str | None = "0.11.2"
    asked: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    max_at_once: int = 0
    base_url: str = ""
    _at_once: int = 0
    _times: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, headers: dict[str, str], body: Body) -> Answer | str:
        with self._lock:
            key = json.dumps(body["messages"])
            times, self._times[key] = self._times[key], self._times[key] + 1
            self.asked.append(body)
            self.headers.append(headers)
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
        try:
            return self.answer(body, times)
        finally:
            with self._lock:
                self._at_once -= 1

    def get(self, path: str) -> Answer:
        if path == "/v1/models":
            return self.models_status, {}, {"object": "list", "data": self.models}
        if path == "/version" and self.version:
            return 200, {}, {"version": self.version}
        return error(404, "Not Found")

    def prompts(self) -> list[str]:
        """The last user message of every question, in the order in which they came."""
        return [body["messages"][-1]["content"] for body in self.asked]


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._give(server.get(self.path))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/chat/completions":
                self._give(error(404, "Not Found"))
                return
            given = server.post(dict(self.headers), json.loads(data))
            if isinstance(given, str):
                self.close_connection = True
            else:
                self._give(given)

        def _give(self, answer: Answer) -> None:
            status, headers, document = answer
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except OSError:  # the asker was killed
                self.close_connection = True

        def log_message(self, *_arguments: Any) -> None: ...

    return Handler


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_arguments: Any) -> None: ...  # a killed asker resets connections


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    """A server at work on a free port; set ``answer`` to change what it says."""
    server = ChatServer()
    listener = _Listener(("127.0.0.1", 0), _handler(server))
    server.base_url = f"http://127.0.0.1:{listener.server_port}/v1"
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def user(text: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """Return an old answer."""
    return {"role": "assistant", "content": text}


def write_chats(path: Path, records: list[Any]) -> Path:
    """Write records (or raw lines) as JSONL."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def questions(count: int) -> list[dict[str, Any]]:
    """Return chats of one question each, with foreign answers."""
    return [
        {"id": f"q{n}", "messages": [user(f"question {n}"), assistant("a foreign answer")]}
        for n in range(count)
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


MakeOptions = Callable[..., Options]


@pytest.fixture
def make_options(chat_server: ChatServer, tmp_path: Path) -> MakeOptions:
    """Return a function that makes options: make_options(records, concurrency=2, ...)."""

    def make(records: list[Any], **changes: Any) -> Options:
        sampling = Sampling(model="tiny", **changes.pop("sampling", {}))
        values: dict[str, Any] = {
            "input": write_chats(tmp_path / "in.jsonl", records),
            "output": tmp_path / "out.jsonl",
            "base_url": chat_server.base_url,
            "sampling": sampling,
            "concurrency": 4,
            "pause_s": 0.01,
        }
        return Options(**values | changes)

    return make

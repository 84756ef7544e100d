"""Endpoint ports: what the smoke test of an endpoint sees, and what a black box says it cannot give."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from harness import plugins
from harness.adapter import capabilities, silent
from harness.adapters import server
from harness.adapters.smoke import CHECKS, smoke
from harness.errors import PortError
from harness.types import Case, Setup

SETUP = Setup(side="accel", role="accel", adapter="openai")
TEXT = "né 🙂 ok"
"""What the server below answers, two bytes a token: characters are cut."""
IDS = [10, 11, 12, 13, 14, 15]


class Endpoint(BaseHTTPRequestHandler):
    """A tiny OpenAI-compatible server; `fault` is what it does wrong."""

    fault: ClassVar[str] = ""
    seen: ClassVar[list] = []

    def log_message(self, *_):
        pass

    def _send(self, code, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            self._send(200, {"data": [] if self.fault == "no_models" else [{"id": "tiny"}]})
        else:
            self._send(503 if self.fault == "unhealthy" else 404, {})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"]))
        bad = 500 if self.fault == "bad_input" else 400
        try:
            body = json.loads(raw)
        except ValueError:
            return self._send(bad, {"error": "no JSON"})
        chat = self.path.endswith("chat/completions")
        prompt = body.get("messages" if chat else "prompt")
        if not isinstance(prompt, (str, list)) or body.get("max_tokens", 1) < 1 or len(prompt) > 64:
            return self._send(bad, {"error": "nonsense"})
        self.seen.append(body)
        return self._answer(body, chat, prompt)

    def _answer(self, body, chat, prompt):
        text = TEXT
        if self.fault == "concurrent" and len(self.seen) > 6:  # three answers and three streams come one by one
            text = TEXT + "!"
        prompt_tokens = len(prompt) + (2 if self.fault == "double_bos" and chat else 1)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(IDS)}
        if body.get("stream"):
            data = text.encode()
            pieces = [data[i : i + 2] for i in range(0, len(data), 2)] if self.fault == "split" else [data]
            lines = []
            for piece in pieces:
                part = piece.decode(errors="replace")
                lines.append({"choices": [{"delta": {"content": part}} if chat else {"text": part}]})
            tail = "" if self.fault == "no_done" else "data: [DONE]\n\n"
            self._send(200, ("".join(f"data: {json.dumps(x)}\n\n" for x in lines) + tail).encode(), "text/event-stream")
            return
        choice = {"message": {"content": text}} if chat else {"text": text}
        choice["finish_reason"] = "length" if self.fault == "finish" else "stop"
        if body.get("return_token_ids"):
            choice["token_ids"] = IDS[::-1] if self.fault == "ids" else IDS
        self._send(200, {"choices": [choice], "usage": usage})


@pytest.fixture
def endpoint():
    http = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    Endpoint.seen.clear()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    http.server_close()
    thread.join()


def request(**kw):
    size = len(kw.get("prompt", kw.get("messages", "")))
    expected = {"token_ids": IDS, "prompt_tokens": size + 1, "text": TEXT, "ended": True}
    return {"max_tokens": 8, "expected": expected, **kw}


def errors(url):
    cases = [request(id="a", prompt="Zürich 東京"), request(id="b", prompt="a much longer prompt, in ASCII")]
    chats = [request(id="c", messages=[{"role": "user", "content": "hello"}])]
    facts = smoke(url, cases, chats=chats, max_length_tokens=64, timeout_s=10)
    assert not facts["not_applicable"]
    assert set(facts["checks"]) == set(CHECKS)
    return {name: entry["detail"] for name, entry in facts["checks"].items() if entry["errors"]}


def test_a_good_endpoint_has_no_errors(endpoint):
    """Every check is made, and none counts an error."""
    Endpoint.fault = ""
    assert errors(endpoint) == {}


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("unhealthy", "health", "503"),
        ("ids", "completion", "expected ids"),
        ("finish", "finish_reason", "found 'length'"),
        ("split", "stream", "�"),
        ("no_done", "stream", "[DONE]"),
        ("bad_input", "bad_input", "found 500"),
        ("concurrent", "concurrent", "beside another request"),
        ("double_bos", "chat_usage", "expected 2 prompt_tokens"),
    ],
)
def test_a_fault_shows_in_its_own_check(endpoint, fault, check, words):
    """Each fault of an endpoint counts errors in the check that is about it, in words that say what was found."""
    Endpoint.fault = fault
    found = errors(endpoint)
    assert check in found
    assert words in " ".join(found[check])
    assert set(found) == {check} | ({"chat"} if fault == "ids" else set())


@pytest.mark.parametrize("place", [None, 3])
def test_an_answer_that_rounding_explains_is_no_error(endpoint, place):
    """Where the port might as well have said every token of another answer, nobody is at fault for it."""
    Endpoint.fault = "ids"
    case, asked = request(id="a", prompt="abc"), []
    case["expected"]["unlikely"] = lambda ids: asked.append(ids) or place
    checks = smoke(endpoint, [case], timeout_s=10)["checks"]
    assert asked == [IDS[::-1]]
    assert (checks["completion"]["errors"] == 0) == (place is None)
    assert ("no rounding of the port's explains number 4" in str(checks["completion"]["detail"])) == (place == 3)
    assert checks["usage"] == {"errors": 0, "of": 2, "detail": []}


def test_a_port_without_own_ids_is_not_held_against_them(endpoint):
    """For a black box only what an endpoint says of itself is checked, and the rest is named as not applicable."""
    Endpoint.fault = ""
    facts = smoke(endpoint, [{"id": "a", "max_tokens": 8, "prompt": [1, 2, 3]}])
    assert set(facts["not_applicable"]) == {"chat", "chat_usage", "finish_reason"}
    assert all(entry["errors"] == 0 for entry in facts["checks"].values())
    assert set(facts["checks"]) | set(facts["not_applicable"]) == set(CHECKS)


def test_an_endpoint_generates_and_says_what_it_cannot_give(endpoint, tmp_path):
    """`openai:` gives the endpoint's token ids; asked for logits it refuses in words; its scope is text alone."""
    Endpoint.fault = ""
    port = plugins.open_adapter(plugins.parse_spec(f"openai:{endpoint}"), None, SETUP)
    assert capabilities(port) == ["serves"]
    assert not port.scope.replay
    assert "*" in port.scope.unobservable
    port.load(tmp_path, SETUP)
    inputs = port.prepare(Case(id="x", token_ids=(1, 2, 3)), silent)
    assert torch.equal(inputs.token_ids, torch.tensor([[1, 2, 3]]))
    assert port.generate(inputs, 8, silent) == IDS
    with pytest.raises(PortError, match="black box"):
        port.forward(inputs, silent)
    with pytest.raises(PortError, match=r"tokenizer\.json"):
        port.prepare(Case(id="y", prompt="text"), silent)
    port.close()


def test_an_endpoint_that_is_down_or_empty_is_named(endpoint, tmp_path):
    """Loading a port that nobody serves says which address did not answer, and what to do."""
    Endpoint.fault = "no_models"
    with pytest.raises(PortError, match="list a model"):
        server.openai(endpoint).load(tmp_path, SETUP)
    with pytest.raises(PortError, match="start the server"):
        server.openai("http://127.0.0.1:9/v1").load(tmp_path, SETUP)


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from http.server import HTTPServer
from test_server import Endpoint
print("listening")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Endpoint).serve_forever()
"""


def test_a_command_is_started_and_ended(tmp_path):
    """`serve:` fills in the port, waits until models are listed, and leaves no process behind."""
    script = tmp_path / "serve.py"
    root = Path(__file__).resolve().parents[2]
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\n" + SCRIPT.format(folder=str(Path(__file__).parent))
    )
    port = server.serve(f"{sys.executable} {script} {{port}}")
    facts = port.load(tmp_path, SETUP)
    process = port.process
    assert facts["model"] == "tiny"
    assert port.generate(port.prepare(Case(id="x", token_ids=(1,)), silent), 8, silent) == IDS
    port.close()
    assert process.poll() is not None


def test_a_command_that_ends_is_reported_with_its_last_words(tmp_path):
    """A server that dies while starting is an error with its exit code and output, not a time-out."""
    with pytest.raises(PortError, match=r"code 3 .*\n.*no card found"):
        server.serve("sh -c 'echo no card found; exit 3' {port}").load(tmp_path, SETUP)
    with pytest.raises(PortError, match=r"expected \{port\}"):
        server.serve("true").load(tmp_path, SETUP)

"""A port that is only an OpenAI-compatible endpoint: `openai:URL`, or `serve:COMMAND`, which starts one on loopback.

It is a black box, and says so: no taps, no phases, no weights; only text can be judged. Knows HTTP, one child process
and the checkpoint's tokenizer; must not know stages or limits. httpx and tokenizers are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Inputs, Recorder, TokenIds
from harness.adapters.smoke import Client
from harness.errors import PortError
from harness.types import Case, Facts, Scope, Setup

BLACK_BOX = "an endpoint is a black box: it shows text, not tensors"
READY_TIMEOUT_S = 600.0
_TAIL_LINES = 20
HIDDEN = ("image", "multi_card", "phases", "weights", "chat", "decisions", "replay", "operators")
"""What an endpoint does not show."""


def openai(url: str) -> EndpointAdapter:
    """Return a port at a base URL such as `http://127.0.0.1:8000/v1`; it must be up when it is loaded."""
    return EndpointAdapter(url)


def serve(command: str) -> CommandAdapter:
    """Return a port that is started by a command; `{port}` and `{checkpoint}` in it are filled in."""
    return CommandAdapter(command)


class EndpointAdapter:
    """An Adapter over HTTP. Options: `model` (default: the first one served), `timeout_s`."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url.rstrip("/"), f"openai:{url}"
        self.scope = Scope(
            layouts=(),
            phases=(),
            replay=False,
            serves=True,
            unobservable={"*": BLACK_BOX},
            off=dict.fromkeys(HIDDEN, BLACK_BOX),
        )
        self.client: Client | None = None
        self._tokenizer: Any = None

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Find the model and the checkpoint's tokenizer. Raises PortError if the endpoint does not answer."""
        import httpx

        self.client = Client(self.url, float(setup.options.get("timeout_s", 60)))
        try:
            self.client.model = setup.options.get("model") or self.client.first_model()
        except (httpx.HTTPError, ValueError) as error:
            raise PortError(
                f"expected a list of models at {self.url}/models, found: {error}; start the server, or correct the URL"
            ) from error
        self._tokenizer = _tokenizer(checkpoint)
        return {"model": self.client.model}

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Turn a case into token ids with the checkpoint's tokenizer."""
        ids = case.token_ids
        if case.messages is not None or case.images:
            raise PortError(
                f"case {case.id}: {self.name} takes a prompt or token ids here; it renders conversations itself"
            )
        if ids is None:
            ids = tuple(self._front(f"tokenise case {case.id}").encode(case.prompt or "").ids)
        inputs = Inputs(token_ids=torch.tensor([list(ids)], dtype=torch.int64))
        record("inputs.token_ids", inputs.token_ids, dims="batch token")
        return inputs

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Raise PortError: an endpoint gives no logits."""
        raise PortError(f"{self.name} cannot give logits or hidden states; {BLACK_BOX}")

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Return a greedy completion's ids: the endpoint's own (`token_ids`), else its text tokenised again."""
        import httpx

        if self.client is None:
            raise PortError(f"{self.name}: expected load() before generate()")
        prompt = inputs.token_ids.reshape(-1).tolist()
        try:
            answer = self.client.complete({"prompt": prompt, "max_tokens": max_new_tokens})
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise PortError(f"expected a completion from {self.url}/completions, found: {error!r}") from error
        if answer["token_ids"] is not None:
            return [int(i) for i in answer["token_ids"]]
        front = self._front("turn the answer into token ids")
        return [int(i) for i in front.encode(answer["text"], add_special_tokens=False).ids][:max_new_tokens]

    def serve(self) -> str:
        """Return the base URL."""
        return self.url

    def close(self) -> None:
        """Close the connections."""
        if self.client is not None:
            self.client.close()
            self.client = None

    def _front(self, purpose: str) -> Any:
        if self._tokenizer is None:
            raise PortError(f"{self.name}: expected tokenizer.json in the checkpoint, to {purpose}; found none")
        return self._tokenizer


class CommandAdapter(EndpointAdapter):
    """An endpoint that `load` starts and `close` ends. Options: as above, and `ready_timeout_s`."""

    def __init__(self, command: str) -> None:
        port = _free_port()
        super().__init__(f"http://127.0.0.1:{port}/v1")
        self.name, self.command, self.port = f"serve:{command}", command, port
        self.process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Start the command and wait for `/models`. Raises PortError, with its last words, if it ends first."""
        words = [
            w.replace("{port}", str(self.port)).replace("{checkpoint}", str(checkpoint))
            for w in shlex.split(self.command)
        ]
        if "{port}" not in self.command:
            raise PortError(
                f"expected {{port}} in the command of {self.name}, so that it listens where day0 asks; add it"
            )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        begin = time.monotonic()
        try:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise PortError(f"expected to start {words[0]!r}, found: {error}") from error
        try:
            self._wait(begin + float(setup.options.get("ready_timeout_s", READY_TIMEOUT_S)))
            return {**super().load(checkpoint, setup), "ready_s": time.monotonic() - begin}
        except BaseException:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        import httpx

        assert self.process is not None
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise PortError(
                    f"{self.name} ended with code {code} before it answered; its last words:\n{self._tail()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/models", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise PortError(f"{self.name} did not answer {self.url}/models in time; its last words:\n{self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def close(self) -> None:
        """End the command and everything it started."""
        super().close()
        process, self.process = self.process, None
        if process is not None:
            for sign, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=wait_s)
        if self._log is not None:
            self._log.close()
            self._log = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tokenizer(checkpoint: Path) -> Any:
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))

"""The protocol that a port implements, and its optional capabilities.

Needs torch and the standard library only, so that a port in a vendor's environment can import it. Must not know stages,
limits, files or how traces are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from harness.types import Case, Facts, Layout, Scope, Setup

TokenIds = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a port's forward takes. token_ids: [1, T] int64. position_ids: [1, T] or [3, 1, T] int64, or None.

    `extras` holds whatever else the port wants (pixel values [patches, C*T*P*P], image grids [images, 3], ...).
    """

    token_ids: Tensor
    position_ids: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter as memory holds it. `name` is the port's own; `checkpoint` the checkpoint's, if the port knows it.

    A port may give a decoded copy of what memory holds (a quantised weight dequantised from its resident form).
    `lossless` False says that the resident form cannot hold every value of the checkpoint (a narrower dtype).
    `computed`: a buffer that the port fills by itself and that no checkpoint need hold.
    """

    name: str
    tensor: Tensor
    checkpoint: str = ""
    lossless: bool = True
    computed: bool = False


class Recorder(Protocol):
    """Called by a port at every place worth looking at. Returns the tensor that the port must go on with.

    `dims` names the axes if the port knows them (`"batch token feature"`); `kind` overrides what the name implies.
    """

    def __call__(self, tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
        """Record a tensor; return what to go on with."""


class Adapter(Protocol):
    """What every port implements. Calls come in this order; `prepare` and below any number of times."""

    name: str
    scope: Scope

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Load the weights. Facts: `peak_bytes`, `planned_bytes`, `unused` and `unfilled` names, if known."""

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Turn a case into inputs, recording `inputs.*`."""

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Return the logits [1, T, V] of a whole prefill without a cache that outlives the call."""

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Return at most `max_new_tokens` greedy token ids; end after an end-of-sequence id."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class Phased(Protocol):
    """Capability `phases`: explicit requests over a cache."""

    def open(self) -> int:
        """Take a slot for a new request. A slot freed before may be given again."""

    def step(self, slot: int, inputs: Inputs, start: int, stop: int, record: Recorder) -> Tensor:
        """Process tokens [start, stop) of `inputs` after those already in the slot; return their logits [1, n, V]."""

    def free(self, slot: int) -> None:
        """Give the slot back."""


@runtime_checkable
class Resuming(Protocol):
    """Capability `resumes`: a request takes up what an earlier one left, where both begin alike (prefix reuse)."""

    def resume(self, inputs: Inputs) -> tuple[int, int]:
        """Take a slot; return it, and how many of the request's first tokens it holds already (not all of them)."""

    def keep(self, slot: int, inputs: Inputs) -> None:
        """Let later requests take up what a slot that `resume` gave holds now: the first tokens of `inputs`."""

    def forget(self) -> None:
        """Give up all that was kept."""


@runtime_checkable
class Rewinding(Protocol):
    """Capability `rewinds`: tokens are taken back, as after drafts that were wrong."""

    def mark(self, slot: int) -> Any:
        """Return what is needed to come back to where a slot is now."""

    def rewind(self, slot: int, mark: Any) -> None:
        """Go back to where a slot was, whatever steps it took since; a mark can be used once."""


@runtime_checkable
class Drafting(Protocol):
    """Capability `drafts`: greedy decoding in which several tokens are guessed, and verified in one step."""

    def speculate(self, inputs: Inputs, max_new_tokens: int, drafts: int) -> tuple[TokenIds, Facts]:
        """Return what `generate` returns, with `drafts` guesses before each step. Facts: `drafted`, `accepted`."""


@runtime_checkable
class Batching(Protocol):
    """Capability `batches`: one call decodes a token of each of several slots."""

    def step_together(
        self, slots: Sequence[int], inputs: Sequence[Inputs], starts: Sequence[int], record: Recorder, seen: int
    ) -> Tensor:
        """Process token `starts[i]` of `inputs[i]` in `slots[i]`, all in one call; return their logits [slots, 1, V].

        `record` is given what belongs to the request number `seen`, as if it were alone [1, 1, ...].
        """


@runtime_checkable
class Weighted(Protocol):
    """Capability `weights`: what memory really holds."""

    def weights(self) -> Iterator[Weight]:
        """Yield every parameter once."""


@runtime_checkable
class Converting(Protocol):
    """Capability `converts`: weights are put into another form as they are loaded, through a workspace used again.

    Such a port promises that loading takes at most what stays, one workspace and one layer, that nothing of what was
    converted is kept, and that no weight depends on what the workspace held before.
    """

    def reload(self, *, reverse: bool, poison: bool) -> Facts:
        """Drop the weights and load them anew; later runs use what is there afterwards.

        `reverse` visits them in the opposite order; `poison` fills the workspace with NaN before each use of it.
        Facts: `workspace_bytes`, and `peak_bytes` by the port's own count.
        """

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that stays for the weights, as it lies in memory: codes apart from their scales."""


@runtime_checkable
class Tokenizing(Protocol):
    """Capability `chat`: the port's own text front end."""

    def encode(self, text: str) -> TokenIds:
        """Tokenise plain text as a request's prompt, special tokens as the port would add them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens skipped."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the chat template and the generation prompt."""

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""


@runtime_checkable
class Serving(Protocol):
    """Capability `serves`: an OpenAI-compatible server."""

    def serve(self) -> str:
        """Start the server on loopback if it is not up, and return its base URL (`http://127.0.0.1:PORT/v1`)."""


@runtime_checkable
class Distributed(Protocol):
    """Capability `multi_card`: several layouts. The worker calls `distribute` before `load`, under torchrun."""

    def distribute(self, layout: Layout) -> None:
        """Take this process's place in the layout; torch.distributed is initialised (world may exceed the layout)."""

    def simulate(self, layout: Layout, inputs: Inputs, record: Recorder) -> Tensor:
        """Run every rank of the layout in this process, one after the other; return the logits [1, T, V]."""


@runtime_checkable
class Caching(Protocol):
    """Capability `cache`: accounting of the paged cache."""

    def cache_facts(self) -> Facts:
        """Return `pages_total`, `pages_free`, `page_tokens`, `bytes`."""


@runtime_checkable
class Compiling(Protocol):
    """Capability `compiled`: a port that runs compiled, and can also run the same code uncompiled."""

    def uncompiled(self) -> AbstractContextManager[None]:
        """Return a context within which nothing compiled is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of a port that can be called alone, as the operator suite calls it (`harness.ops.families`).

    `level`: library, compiled, triton, custom or reference. `kernel`: an autotuned kernel inside of it (an object with
    `configs`), each of whose configurations is tested; `variants`: the same, listed as functions by name.
    """

    call: Callable[..., Any]
    level: str
    kernel: Any = None
    variants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@runtime_checkable
class Operating(Protocol):
    """Capability `operators`: the operator table.

    A port may also have `arithmetic`, what its device declares of its numbers (`harness.ops.arithmetic`), as words.
    """

    def operators(self) -> Mapping[str, str | Operator]:
        """Return for each operator its level, or the operator itself where it can be called alone."""


@runtime_checkable
class Streaming(Protocol):
    """Capability `streamed`: weights pass by instead of staying, and forwards can go along in one pass over them."""

    def beside(self, setup: Setup) -> Adapter:
        """Return another adapter, not loaded, whose forwards can go along with those of this one."""

    def together(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do tasks that run adapters of one stream, at most one at a time; return what each gave, or raised."""

    def stream_facts(self) -> Facts:
        """Return `read_bytes` so far, and `checkpoint_bytes`."""


class Rounding(Protocol):
    """What a port declares of its numbers, as functions; given to a reference that is to compute so."""

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight [out, in] as the port holds it; of what is kept as it is, the tensor itself."""

    def inputs(self) -> AbstractContextManager[Any]:
        """Return what rounds the inputs of products with such weights, while it is entered."""

    def writer(self) -> Callable[..., Tensor]:
        """Return what rounds what one request keeps: name and new values -> values to keep.

        `state=True` says that it is a recurrent state, which is declared apart from caches.
        """


@runtime_checkable
class Roundable(Protocol):
    """Capability `precision`, of a reference: it can compute as a port does that holds its numbers in narrower formats.

    `rounding` is what it was given, None until then.
    """

    rounding: Rounding | None

    def round_with(self, rounding: Rounding) -> None:
        """Round weights now, inputs and what is cached from now on. Called after `load`."""


def capabilities(adapter: Any) -> list[str]:
    """Return the names of the optional capabilities that an adapter has."""
    table: list[tuple[str, Any]] = [
        ("phases", Phased), ("weights", Weighted), ("converts", Converting), ("chat", Tokenizing), ("serves", Serving),
        ("multi_card", Distributed), ("cache", Caching), ("operators", Operating), ("precision", Roundable),
        ("compiled", Compiling), ("streamed", Streaming), ("resumes", Resuming), ("rewinds", Rewinding),
        ("batches", Batching), ("drafts", Drafting),
    ]  # fmt: skip
    off = adapter.scope.off
    return [name for name, protocol in table if isinstance(adapter, protocol) and name not in off]


def silent(tap: str, tensor: Tensor, *, dims: str = "", kind: str = "") -> Tensor:
    """Record nothing (a Recorder): the port runs as it would without day0."""
    return tensor

"""The built-in port with one mistake, or one harmless difference, in what requests of a cache share.

`shared_cache_ports.py:port?fault=NAME`. Like `builtin_ports.py`; what is here is right for a request alone.
"""

from __future__ import annotations

from typing import Any

from port_file import Faults, around

from accel_impl.cache import PagedCache
from accel_impl.reuse import Reuse
from accel_impl.store import Memory, SlotStore
from harness.adapter import Inputs

FAULTS = Faults()
port, fault = FAULTS.port, FAULTS.add


@fault
def states_not_rewound() -> None:
    """Tokens that are taken back leave the pages, but stay in the recurrent states."""

    def restore(real: Any, self: Memory, slot: int, kept: Any) -> None:
        self.pages.truncate(slot, kept.length)

    around(Memory, "restore", restore)


@fault
def states_not_taken_up() -> None:
    """A prefix is taken up with its pages only; the recurrent states begin at nothing."""

    def adopt(real: Any, self: Memory, slot: int, *how: Any) -> None:
        real(self, slot, *how)
        self.states.reset(slot)

    around(Memory, "adopt", adopt)


@fault
def page_not_copied() -> None:
    """A page that is full in part is shared instead of copied, so requests write over each other's tokens."""

    def copy(real: Any, self: PagedCache, slot: int, page: int, count: int) -> None:
        self.hold([page])
        self.block_tables[slot].append(page)
        self.lengths[slot] += count

    around(PagedCache, "copy", copy)


@fault
def states_crossed() -> None:
    """A step of several requests writes their states back in another order."""

    def put_inputs(real: Any, self: SlotStore, layer: int, values: Any) -> None:
        real(self, layer, values.roll(1, 0))

    around(SlotStore, "put_inputs", put_inputs)


@fault
def moved_and_coarse() -> None:
    """No fault: pages change places before every step, and prefixes end with a whole page."""

    def made(real: Any, self: SlotStore, memory: Memory, *how: Any) -> None:
        memory.pages.permute([*range(1, memory.pages.pages), 0])
        real(self, memory, *how)

    def keep(real: Any, self: Reuse, slot: int, inputs: Inputs, **how: Any) -> None:
        if self.memory.pages.lengths[slot] % self.memory.pages.page_tokens == 0:
            real(self, slot, inputs, **how)

    around(SlotStore, "__init__", made)
    around(Reuse, "keep", keep)

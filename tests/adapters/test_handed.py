"""Values handed out are followed, and forgotten with their memory."""

import weakref

import torch

from harness.adapters.handed import Handed
from harness.recorder import TraceRecorder


def test_a_view_and_a_cast_that_was_learnt_are_known():
    """A value is known by itself and by a view of it, until it is written into."""
    handed, value = Handed(), torch.arange(6.0)
    handed.learn(value)
    view = value.view(2, 3)
    assert handed.known(value)
    assert handed.known(view)
    assert not handed.known(value + 0)
    value.add_(1)
    assert not handed.known(value)
    assert not handed.known(value.view(3, 2))


def test_a_view_of_an_overwritten_value_stands_for_what_overwrote_it():
    """Where a value was replaced, its views lead to the replacement in their own shape."""
    handed, own, other = Handed(), torch.zeros(6), torch.ones(6)
    assert handed.learn(own, other) is other
    view = own.view(2, 3)
    assert handed.known(view)
    assert torch.equal(handed.standing_for(view), torch.ones(2, 3))
    assert handed.standing_for(other) is other


def test_a_view_outlives_the_tensor_that_it_was_taken_of():
    """The memory is what counts: a view is known when the first tensor over it is gone."""
    handed, value = Handed(), torch.arange(6.0)
    handed.learn(value)
    view = value.view(2, 3)
    del value
    assert handed.known(view)


def test_nothing_is_kept_alive_and_memory_used_again_is_not_known():
    """A value that nobody else holds is let go; another one at its address is another value."""
    handed, record = Handed(), TraceRecorder(statistics=True)
    record.span(0, 4)
    for _ in range(50):  # the allocator gives the same address again and again
        value = torch.ones(1, 4, 64)
        assert not handed.known(value)
        handed.learn(value)
        assert record("layers.0.in", value) is value
        gone = weakref.ref(value)
        del value
        assert gone() is None


def test_what_stands_for_a_value_goes_with_it():
    """In a replay of many layers, what overwrote values that are gone is let go, while what is in use still counts."""
    handed, kept, alive = Handed(), torch.zeros(6), []
    handed.learn(kept, torch.ones(6))
    for _ in range(3000):
        own, other = torch.zeros(6), torch.ones(6)
        alive.append(weakref.ref(other))
        handed.learn(own, other)
    assert sum(ref() is not None for ref in alive) < 1000
    assert torch.equal(handed.standing_for(kept), torch.ones(6))
    assert handed.known(kept.view(2, 3))

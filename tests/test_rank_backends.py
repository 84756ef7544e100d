from __future__ import annotations

from harness.ranks import backend_for


def test_a_device_without_collectives_is_joined_through_the_host():
    """A device keeps the backend that torch knows for it; one that torch knows none for joins by gloo."""
    assert backend_for("cuda") == "nccl"
    assert backend_for("cpu") == "gloo"
    assert backend_for("privateuseone") == "gloo"

"""Digests of tensors."""

import pytest
import torch

from harness.errors import TraceError
from harness.golden import digest

SIZES = (0, 1, 64, 65, 1023, 1024, 1025, 2048, 3073, 5 * 1024, 70_001)


@pytest.mark.parametrize("size", SIZES)
def test_the_own_blake3_equals_the_package(size):
    """Where the package is missing, digests made with it are still checked: both give the same bytes."""
    package = pytest.importorskip("blake3")
    data = bytes((i * 31 + i // 251) % 256 for i in range(size))
    assert digest.blake3(data) == package.blake3(data).digest()


def test_a_digest_covers_dtype_and_shape(monkeypatch):
    """The same bytes in another dtype or shape have another digest; without the package BLAKE3 digests are equal."""
    value = torch.arange(12, dtype=torch.int32)
    digests = [digest.tensor_digest(t, "blake3") for t in (value, value.reshape(3, 4), value.view(torch.float32))]
    assert len(set(digests)) == 3
    monkeypatch.setattr(digest, "_package", lambda: None)
    assert digest.algorithm() == "blake2b"
    assert digest.tensor_digest(value, "blake3") == digests[0]


def test_an_unknown_algorithm_is_refused():
    """A manifest that names another algorithm cannot be believed."""
    with pytest.raises(TraceError, match="md5"):
        digest.tensor_digest(torch.ones(1), "md5")

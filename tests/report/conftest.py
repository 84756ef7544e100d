"""The two synthetic runs as fixtures."""

from __future__ import annotations

import pytest
from synthetic import accepted_run, refused_run

from harness.report.results import Results


@pytest.fixture
def accepted() -> Results:
    return accepted_run()


@pytest.fixture
def refused() -> Results:
    return refused_run()

"""The clock of islands whose time must not depend on the machine."""

import pytest
from virtual_clock import VirtualClock


@pytest.fixture
def clock(monkeypatch):
    """The time of a test's own thread, of those that its `Thread` makes, and of what islands do beside them."""
    clock = VirtualClock(1)
    clock.rule(monkeypatch)
    return clock

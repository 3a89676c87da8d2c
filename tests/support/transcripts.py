"""Comparing what a program prints with what a page shows."""

import re

import pytest

DECIMAL = re.compile(r"\d+\.\d+")


def assert_alike(printed: str, shown: str) -> None:
    """Words and whole numbers, such as bytes, are equal; losses are close, whatever the compiler and its version."""
    assert DECIMAL.sub("#", printed) == DECIMAL.sub("#", shown)
    found, wanted = ([float(number) for number in DECIMAL.findall(text)] for text in (printed, shown))
    assert found == pytest.approx(wanted, rel=0.05, abs=0.01)

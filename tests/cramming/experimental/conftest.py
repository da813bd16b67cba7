"""Fixtures of the tests of parallel strategies."""

from tests.cramming.parallel.conftest import alone, case

__all__ = ["alone", "case"]

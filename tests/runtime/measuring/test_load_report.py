"""Figures of the load benchmark."""

from dspark.runtime.measuring.load_figures import Percentiles


def test_percentiles() -> None:
    assert Percentiles.of(list(range(101))) == Percentiles(p50=50.0, p99=99.0)
    assert Percentiles.of([]) is None

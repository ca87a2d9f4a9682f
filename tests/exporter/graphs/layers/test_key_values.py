"""Keys and values, cached and new."""

import numpy as np

from dspark.exporter.graphs.layers import cached_rows, part_sizes
from tests.exporter.graphs.recorded import assert_computes, random

KEY, VALUE, NEW = random(2, 1, 5, 3), random(2, 1, 5, 3, seed=1), random(2, 1, 4, 3)


def test_the_cached_rows_are_the_inputs_of_their_names() -> None:
    inputs = {"past.0.value": VALUE, "past.0.key": KEY}
    names = ("past.0.key", "past.0.value")
    assert_computes(lambda g: [g.op("Identity", x) for x in cached_rows(g, names)], inputs, KEY, VALUE, tolerance=0)


def test_each_part_has_its_number_of_keys() -> None:
    inputs = {"cached": KEY, "new": NEW}
    assert_computes(lambda g: [part_sizes(g, g.input("cached"), g.input("new"))], inputs, np.array([5, 4]))

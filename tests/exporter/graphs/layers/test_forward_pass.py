"""What tokens attend to, in the order of the bias."""

from typing import Any

from dspark.exporter.graphs.layers import after


def test_all_parts_of_the_layer_come_before_the_tokens_own() -> None:
    parts: Any = [[("k00", "v00"), ("k01", "v01")], [("k10", "v10"), ("k11", "v11")]]
    own: Any = ("k", "v")
    assert after(*parts)(1, own) == [("k01", "v01"), ("k11", "v11"), own]
    assert after()(0, own) == [own]

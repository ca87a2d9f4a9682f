"""Which encoding each layer gets."""

import pytest

from dspark.exporter.graphs.encodings import Blocks, Encoding, Encodings, Float16, Float32, Int8, Int8Weights

TABLES = Float16()
LINEAR: list[Encoding] = [Float32(), Float16(), Int8(), Int8Weights(), Blocks(4, 32, 4)]


@pytest.mark.parametrize("linear", LINEAR, ids=lambda each: type(each).__name__)
def test_layers_and_tables(linear: Encoding) -> None:
    encodings = Encodings(linear, TABLES)
    for name in ("layers.0.self_attn.qkv_proj", "drafter.layers.1.self_attn.kv_proj", "markov_head.gate_proj"):
        assert encodings.of(name) is linear
    assert encodings.of("lm_head") is TABLES


@pytest.mark.parametrize("linear", LINEAR, ids=lambda each: type(each).__name__)
def test_confidences_are_never_rounded(linear: Encoding) -> None:
    assert isinstance(Encodings(linear, TABLES).of("confidence_head.proj"), Float32)


@pytest.mark.parametrize("linear", LINEAR, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("name", ["fc", "drafter.fc"])
def test_fc_is_not_rounded_to_whole_numbers(name: str, linear: Encoding) -> None:
    found = Encodings(linear, TABLES).of(name)
    if isinstance(linear, Int8 | Blocks):  # their products round the raw residual stream, too
        assert isinstance(found, Float32)
    else:
        assert found is linear


@pytest.mark.parametrize("tables", [Int8(), Blocks(8, 64, 4)])
def test_tables_of_the_head_are_looked_up_in_few_nodes(tables: Encoding) -> None:
    assert type(Encodings(Int8(), tables).head_tables) is Float16


@pytest.mark.parametrize("tables", [Float32(), Float16(), Int8Weights()])
def test_other_tables_of_the_head_are_as_the_others(tables: Encoding) -> None:
    assert Encodings(Int8(), tables).head_tables is tables

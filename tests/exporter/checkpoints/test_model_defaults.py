"""The written-down defaults against the configuration classes of transformers."""

import pytest

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.rope import resolve_rope

CLASSES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}


def test_families() -> None:
    assert set(model_defaults()) == set(CLASSES)


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, CLASSES[family])
    fields = {name: field.default for name, field in cls.__dataclass_fields__.items()}
    for key, value in model_defaults()[family].items():
        assert fields[key] == value, key
    assert cls.model_type == family
    assert cls.default_theta == 10000.0
    head_dim = cls().head_dim if hasattr(cls(), "head_dim") else 128
    assert resolve_rope(model_defaults()[family], head_dim).inverse_frequencies[1] == pytest.approx(
        10000 ** (-2 / head_dim)
    )


@pytest.mark.parametrize("family", CLASSES)
def test_nothing_that_the_exporter_reads_is_left_out(family: str) -> None:
    """A key that the class has and the decoder reads must be written down, or its default would be missed."""
    transformers = pytest.importorskip("transformers")
    from dspark.exporter.checkpoints.decoder import Decoder

    fields = getattr(transformers, CLASSES[family]).__dataclass_fields__
    assert set(Decoder.model_fields) & set(fields) <= set(model_defaults()[family])

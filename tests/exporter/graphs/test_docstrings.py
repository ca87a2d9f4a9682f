"""The builders' docstrings state the inputs and outputs of their graphs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import prepare
from dspark.exporter.graphs import build_block_drafter, build_eagle3_drafter, build_head, build_target
from dspark.exporter.graphs.facts import drafter_facts, target_facts
from dspark.runtime.bundle.graph_specs import (
    GraphSpec,
    TensorSpec,
    block_drafter_spec,
    eagle3_drafter_spec,
    head_spec,
    target_spec,
)
from tests.checkpoints import write_target
from tests.exporter.graphs.cases import CASES, DYNAMIC

BUILDERS: dict[str, Callable[..., object]] = {
    "target": build_target,
    "block": build_block_drafter,
    "head": build_head,
    "eagle3": build_eagle3_drafter,
}
SPECS = {"block": block_drafter_spec, "head": head_spec, "eagle3": eagle3_drafter_spec}
FREE = ("B", "N", "T", "S", "S+T")
"""Names of dimensions that no model fixes; K is free in the target's graph alone."""
ROW = re.compile(r"^ *\| `([^`]+)` \| (\w+) `\[(.+?)\]` \| (.+) \|$", re.MULTILINE)


def documented(builder: Callable[..., object]) -> list[dict[str, tuple[str, list[str], str]]]:
    """Type, shape and remark of each input and of each output in a builder's docstring, by the pattern of its name."""
    assert builder.__doc__ is not None
    _, inputs, outputs = re.split(r"\| (?:input|output) \|", builder.__doc__)
    return [
        {
            name.replace("{j}", "{l}"): (dtype, shape.split(", "), remark)
            for name, dtype, shape, remark in ROW.findall(part)
        }
        for part in (inputs, outputs)
    ]


def pattern(name: str) -> str:
    """``past.3.key`` → ``past.{l}.{key,value}``."""
    return re.sub(r"\.\d+\.(key|value)$", ".{l}.{key,value}", name)


@pytest.fixture
def specs(tmp_path: Path) -> Callable[[str], list[GraphSpec]]:
    """Specifications of all forms of a graph."""

    def specs(builder: str) -> list[GraphSpec]:
        found = []
        target = write_target(tmp_path / "target", **DYNAMIC)
        for name, (write, options, choices) in CASES.items():
            planned = prepare(target, write(tmp_path / name, target, **options), tmp_path / "bundle", **choices)
            assert planned.drafter is not None
            facts = drafter_facts(planned.drafter)
            if builder == "target":
                found += [target_spec(target_facts(planned.target, form), facts) for form in ("in-place", "delta")]
            elif facts.one_pass == (builder != "eagle3"):
                found.append(SPECS[builder](facts))
        return found

    return specs


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_input_and_output_is_stated(builder: str, specs: Callable[[str], list[GraphSpec]]) -> None:
    inputs, outputs = documented(BUILDERS[builder])
    forms = specs(builder)
    assert len(forms) > 1
    for stated, tensors in (
        (inputs, [each for spec in forms for each in spec.inputs]),
        (outputs, [each for spec in forms for each in spec.outputs]),
    ):
        assert stated.keys() == {pattern(each.name) for each in tensors}
        for each in tensors:
            assert_stated(each, *stated[pattern(each.name)])


def assert_stated(tensor: TensorSpec, dtype: str, shape: list[str], remark: str) -> None:
    """A remark such as ``[…, S+T]`` may give the other form of a dimension."""
    assert (tensor.dtype.name, len(tensor.shape)) == (dtype, len(shape))
    for size, stated in zip(tensor.shape, shape, strict=True):
        if isinstance(size, str):
            assert size == stated or f", {size}]" in remark
        else:
            assert stated not in FREE
            assert not stated.isdigit() or int(stated) == size

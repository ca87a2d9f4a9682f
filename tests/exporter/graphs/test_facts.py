"""A graph's facts are the same whether they are read off a checkpoint's description or off the bundle's manifest."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from dspark.exporter.export import prepare
from dspark.exporter.graphs import build_block_drafter, build_eagle3_drafter, build_head, build_target
from dspark.exporter.graphs.facts import drafter_facts, target_facts
from dspark.runtime import Bundle
from dspark.runtime.graph_specs import (
    GraphSpec,
    block_drafter_spec,
    eagle3_drafter_spec,
    graph_specs,
    head_spec,
    target_spec,
)
from tests.checkpoints import write_deepspec, write_eagle3, write_speculators, write_target, write_zlab_dflash
from tests.exported import export

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
Write = Callable[..., Path]
CASES: dict[str, tuple[Write, dict[str, Any], dict[str, Any]]] = {
    "rnn": (write_deepspec, {}, {}),
    "no-head": (write_deepspec, {"head": "none", "confidence": "none"}, {}),
    "no-confidence": (write_deepspec, {"head": "gated", "confidence": "none"}, {}),
    "one-slot": (write_deepspec, {"block_size": 1}, {}),
    "anchor-predicts-nothing": (write_zlab_dflash, {}, {}),
    "reduced-vocabulary": (write_speculators, {"draft_vocab": 50}, {}),
    "top-k": (write_deepspec, {}, {"draft_top_k": 8}),
    "top-k-of-a-reduced-vocabulary": (write_speculators, {"draft_vocab": 50}, {"draft_top_k": 8}),
    "eagle3": (write_eagle3, {"steps": 3}, {}),
    "eagle3-reduced-vocabulary": (write_eagle3, {"draft_vocab": 60}, {}),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_facts_and_graphs_are_the_manifests(case: str, dynamic: bool, tmp_path: Path) -> None:
    write, options, choices = CASES[case]
    target = write_target(tmp_path / "target", **(DYNAMIC if dynamic else {}))
    drafter = write(tmp_path / "drafter", target, **options)
    for form in ("in-place", "delta"):
        planned = prepare(target, drafter, tmp_path / form, cache_form=form, **choices)
        bundle = Bundle.open(export(target, drafter, tmp_path / form, cache_form=form, **choices))
        specs = graph_specs(bundle.manifest)
        assert planned.drafter is not None
        facts = drafter_facts(planned.drafter)
        assert target_spec(target_facts(planned.target, planned.cache_form), facts) == specs["target"]
        if facts.one_pass:
            assert [block_drafter_spec(facts), head_spec(facts)] == [specs["drafter"], specs["head"]]
        else:
            assert eagle3_drafter_spec(facts) == specs["drafter"]
        for name, spec in specs.items():
            graph = onnx.load(bundle.graph(name), load_external_data=False).graph
            for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
                shapes = {
                    value.name: tuple(each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim)
                    for value in values
                }
                assert shapes == {each.name: each.shape for each in tensors}


# --- docstrings ---

BUILDERS = {
    "target": (build_target, ("target",)),
    "block": (build_block_drafter, ("drafter",)),
    "head": (build_head, ("head",)),
    "eagle3": (build_eagle3_drafter, ("drafter",)),
}
ROW = re.compile(r"^ *\| `([^`]+)` \| (\w+) `\[(.+?)\]` \| (.+) \|$", re.MULTILINE)


def documented(builder: Callable[..., object]) -> list[dict[str, tuple[str, str, str]]]:
    """Type, shape and remark of each input and of each output in a builder's docstring."""
    assert builder.__doc__ is not None
    _, inputs, outputs = re.split(r"\| (?:input|output) \|", builder.__doc__)
    return [{name: rest for name, *rest in ROW.findall(part)} for part in (inputs, outputs)]  # type: ignore[misc]


def pattern(name: str) -> str:
    """``past.3.key`` → ``past.{l}.{key,value}``, with ``j`` for the layers of a drafter."""
    return re.sub(r"\.(\d+)\.(key|value)$", ".{l}.{key,value}", name)


def specs_of(builder: str, tmp_path: Path) -> list[GraphSpec]:
    """Specifications of all forms of a graph."""
    found = []
    for index, (write, options, choices) in enumerate(CASES.values()):
        if (builder == "eagle3") != (write is write_eagle3) and builder != "target":
            continue
        target = write_target(tmp_path / f"target{index}", **DYNAMIC)
        drafter = write(tmp_path / f"drafter{index}", target, **options)
        planned = prepare(target, drafter, tmp_path / "bundle", **choices)
        assert planned.drafter is not None
        facts = drafter_facts(planned.drafter)
        if builder == "target":
            found += [target_spec(target_facts(planned.target, form), facts) for form in ("in-place", "delta")]
        else:
            spec = {"block": block_drafter_spec, "head": head_spec, "eagle3": eagle3_drafter_spec}[builder]
            found.append(spec(facts))
    return found


@pytest.mark.parametrize("builder", BUILDERS)
def test_docstrings_state_inputs_and_outputs(builder: str, tmp_path: Path) -> None:
    """Every name of any form of the graph, its type and its number of dimensions, with those that are free by name."""
    inputs, outputs = documented(BUILDERS[builder][0])
    specs = specs_of(builder, tmp_path)
    for stated, side in ((inputs, "inputs"), (outputs, "outputs")):
        tensors = [each for spec in specs for each in getattr(spec, side)]
        assert {name.replace("{j}", "{l}") for name in stated} == {pattern(each.name) for each in tensors}
        by_pattern = {name.replace("{j}", "{l}"): rest for name, rest in stated.items()}
        for each in tensors:
            dtype, shape, remark = by_pattern[pattern(each.name)]
            dimensions = shape.split(", ")
            assert (each.dtype.name, len(each.shape)) == (dtype, len(dimensions))
            free = [
                size for size in dimensions if size in ("B", "N", "T", "S", "S+T", "K") and "logits" not in each.name
            ]
            named = [size for size in each.shape if isinstance(size, str)]
            if "[…, S+T]" in remark and "S+T" in named:
                free[-1] = "S+T"
            assert set(named) <= {*free, *dimensions}

"""A graph's facts are the same whether they are read off a checkpoint's description or off the bundle's manifest."""

from pathlib import Path

import onnx
import pytest

from dspark.exporter.export import prepare
from dspark.exporter.graphs.facts import drafter_facts, target_facts
from dspark.runtime import Bundle
from dspark.runtime.bundle.graph_specs import (
    block_drafter_spec,
    eagle3_drafter_spec,
    graph_specs,
    head_spec,
    target_spec,
)
from tests.checkpoints import write_target
from tests.exporter.graphs.cases import CASES, DYNAMIC
from tests.support.exported import export


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

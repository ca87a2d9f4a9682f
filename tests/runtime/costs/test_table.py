"""Whatever table is accepted answers every query."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.table import CostTable, StepCurve
from tests.runtime.costs.curves import drafts
from tests.support.costs import KEY

RATES = st.floats(1e-6, 1e12)

WILD = st.one_of(
    st.sampled_from([0, 1, 2, 3, 64, 128, 1 << 20, 1 << 30, 10**30, 1e-320, 1e300]),
    st.lists(st.sampled_from([1, 2, 3, 4, 1 << 20, 1 << 30, 10**30]), max_size=4),
    st.lists(st.sampled_from([1e-320, 1e-6, 1.0, 1e12, 1e300]), max_size=4),
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Content of a table that was right, before up to two things in it were overwritten, left out or doubled."""
    lengths = sorted({1, *draw(st.sets(st.integers(2, 9), max_size=3))})
    numbers = sorted({1, *draw(st.sets(st.integers(2, 1024), max_size=2))})
    near = draw(st.sampled_from([64, 128]))
    curves = [
        {
            "requests": number,
            "context_length": context,
            "sample_batch_tokens": [number * length for length in lengths],
            "sample_steps_per_sec": [draw(RATES) for _ in lengths],
        }
        for number, context in [(1, draw(st.sampled_from([256, 1 << 30]))), *((number, near) for number in numbers)]
    ]
    content: dict[str, Any] = {
        "key": KEY.model_dump(),
        "max_batch_tokens": numbers[-1] * lengths[-1],
        "curves": curves,
        **drafts(numbers, [draw(RATES) for _ in numbers], near),
    }
    if draw(st.booleans()):
        content["draft_curves"] += drafts([1], [draw(RATES)], draw(st.sampled_from([256, 1 << 30])))["draft_curves"]
    for _ in range(draw(st.integers(0, 2))):
        curve = draw(st.sampled_from(curves)) if curves else content
        match draw(st.sampled_from(["overwrite", "overwrite a curve", "leave out", "double"])):
            case "overwrite":
                part = draw(st.sampled_from([content, *content["draft_curves"]]))
                part[draw(st.sampled_from(sorted({*part} - {"key", "curves", "draft_curves"})))] = draw(WILD)
            case "overwrite a curve":
                curve[draw(st.sampled_from(sorted(curve)))] = draw(WILD)
            case "leave out":
                content["curves"] = curves = [each for each in curves if each is not curve]
            case "double":
                content["curves"] = curves = [*curves, dict(curve)]
    return content


@settings(max_examples=150)
@given(
    content=tables(), requests=st.integers(1, 1024), context=st.integers(0, 1 << 30), draft_tokens=st.integers(0, 64)
)
def test_whatever_is_accepted_answers_every_query(
    content: dict[str, Any], requests: int, context: int, draft_tokens: int
) -> None:
    try:
        table = CostTable.model_validate_json(json.dumps(content))
    except ValidationError:
        reject()
    model = CostModel(table)
    counts = np.arange(draft_tokens + 1)
    for longest in (1 + counts, 1 - (-counts // requests)):  # all for one request, or shared
        seconds = model.step_seconds(requests, context, counts, longest)
        assert seconds.shape == counts.shape
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()
    assert 0 < model.draft_seconds(requests, context) < float("inf")


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [((1, 2), (1.0,), "equally long"), ((2, 3), (1.0, 1.0), "must rise"), ((1, 1), (1.0, 1.0), "must rise")],
)
def test_a_curve_that_makes_no_sense(tokens: tuple[int, ...], rates: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCurve(requests=1, context_length=64, sample_batch_tokens=tokens, sample_steps_per_sec=rates)

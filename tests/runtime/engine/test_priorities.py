"""Interactive requests go first, and batch requests still run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.runtime import RequestError, SamplingParams
from dspark.runtime.engine.request import Request
from tests.runtime.engine.support import FIXED, drain, submitted
from tests.support.golden_models import PROMPTS, load

GoldenBundle = Callable[[str], Path]


def test_batch_requests_run_beside_interactive_ones_that_keep_coming(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 2, FIXED)
    params = SamplingParams(max_new_tokens=6)
    patient = [inference.request(PROMPTS[1], params, priority="batch") for _ in range(3)]
    for request in patient:
        inference.engine.submit(request)
    others: list[Request] = []
    started: list[Request] = []
    while any(request.finish_reason is None for request in patient):
        while sum(each.finish_reason is None for each in others) < 8:  # there is always a crowd
            others += submitted(inference, 6)
        started += [each for each in inference.engine.step() if each not in started]
        assert len(others) < 40
    assert [started.index(request) for request in patient] == [3, 7, 11]
    for each in others:
        inference.engine.cancel(each)


def test_interactive_requests_go_first(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 1, FIXED)
    params = SamplingParams(max_new_tokens=4)
    bulk = [inference.request(PROMPTS[1], params, priority="batch") for _ in range(4)]
    for request in bulk:
        inference.engine.submit(request)
    (urgent,) = submitted(inference, 4)
    while urgent.finish_reason is None:
        inference.engine.step()
    assert [each.finish_reason for each in bulk] == [None] * 4
    drain(inference)
    assert [each.finish_reason for each in bulk] == ["length"] * 4


def test_a_priority_that_does_not_exist_is_refused(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 1, FIXED)
    with pytest.raises(RequestError, match="priority is 'urgent'; there are interactive and batch"):
        inference.generate([PROMPTS[0]], priority="urgent")  # type: ignore[arg-type]

"""Penalties and biases of logits."""

import numpy as np
import pytest

from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError
from tests.support.shaping import distribution


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="logit_bias names token 8; the vocabulary ends at 7"):
        Sampler(SamplingParams(logit_bias={8: 1.0}), [], 8)


@pytest.mark.parametrize("bias", [1e30, 1e300, -1e30, -1e300])
@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0])
def test_a_bias_beyond_float32_forces_or_forbids(bias, temperature):
    logits = np.array([0, 1, 0.5], np.float32)
    p = distribution(logits, SamplingParams(temperature=temperature, logit_bias={0: bias}))
    assert p.sum() == pytest.approx(1)
    assert p[0] == (1 if bias > 0 else 0)


def test_the_penalties_leave_the_logits_alone():
    logits = np.ones(4, np.float32)
    distribution(logits, SamplingParams(repetition_penalty=2.0, logit_bias={1: 4.0}), prompt=[0])
    np.testing.assert_array_equal(logits, np.ones(4, np.float32))

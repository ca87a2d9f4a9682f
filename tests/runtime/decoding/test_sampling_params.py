"""Sampling options: defaults, rows that override them, and what is refused."""

import math

import pytest

from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError


def test_defaults_are_greedy_and_unshaped():
    params = SamplingParams()
    assert params.greedy
    assert params.max_new_tokens == 128
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_parse_overrides_only_what_it_is_given():
    base = SamplingParams(temperature=0.7, top_k=5, stop=("a",), seed=3)
    row = {"top_p": 0.5, "stop": "END", "logit_bias": {"7": -1, 8: 2.5}, "seed": None, "temperature": 1}
    params = SamplingParams.parse(base, row)
    assert params == SamplingParams(
        temperature=1.0, top_k=5, top_p=0.5, stop=("END",), logit_bias={7: -1.0, 8: 2.5}, seed=None
    )
    assert SamplingParams.parse(base, {"stop": ["x", "y"]}).stop == ("x", "y")
    assert SamplingParams.parse(base, {}) == base


def test_null_says_nothing():
    base = SamplingParams(temperature=0.7, stop=("a",), seed=3)
    row = dict.fromkeys([*SamplingParams.model_fields, "temprature"])
    with pytest.raises(RequestError, match="unknown sampling option 'temprature'"):
        SamplingParams.parse(base, row)
    del row["temprature"], row["seed"]
    assert SamplingParams.parse(base, row) == base
    assert SamplingParams.parse(base, {"seed": None}).seed is None, "a seed can be none"


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("max_new_tokens", 0, "greater than or equal to 1"),
        ("max_new_tokens", 1.5, "integer"),
        ("max_new_tokens", True, "integer"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "warm", "number"),
        ("top_k", -1, "greater than or equal to 0"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("min_p", 1.01, "less than or equal to 1"),
        ("min_p", -0.01, "greater than or equal to 0"),
        ("repetition_penalty", 0.0, "greater than or equal to 0.001"),
        ("temperature", 1e9, "less than or equal to 1000"),
        ("presence_penalty", math.nan, "finite"),
        ("frequency_penalty", -math.inf, "finite"),
        ("logit_bias", {"x": 1.0}, "integer"),
        ("logit_bias", {-1: 1.0}, "greater than or equal to 0"),
        ("logit_bias", {1: math.inf}, "finite"),
        ("logit_bias", [1], "dict"),
        ("stop", "", "at least 1 character"),
        ("stop", ["a", ""], "at least 1 character"),
        ("stop", 5, "tuple"),
        ("seed", -1, "greater than or equal to 0"),
        ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("stop_token_ids", ["<eos>"], "integer"),
        ("stop_token_ids", 7, "tuple"),
    ],
)
def test_a_bad_value_is_refused_with_option_value_and_rule(option, value, rule):
    with pytest.raises(RequestError, match=option) as caught:
        SamplingParams.parse(SamplingParams(), {option: value})
    assert rule in str(caught.value)
    with pytest.raises(RequestError, match=option):
        SamplingParams(**{option: value})


def test_the_error_shows_the_value():
    with pytest.raises(RequestError, match=r"^sampling option top_p = 7: must be less than or equal to 1$"):
        SamplingParams.parse(SamplingParams(), {"top_p": 7})


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(RequestError, match=r"^unknown sampling option 'temprature'; did you mean 'temperature'\?$"):
        SamplingParams.parse(SamplingParams(), {"temprature": 1.0})
    with pytest.raises(RequestError, match="unknown sampling option 'zzz'; there are: max_new_tokens, temperature"):
        SamplingParams.parse(SamplingParams(), {"zzz": 1.0})

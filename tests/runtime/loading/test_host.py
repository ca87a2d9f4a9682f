"""Host options: providers and threads as users write them."""

import os
from typing import Any

import pytest

from dspark.runtime import ProviderError, RequestError
from dspark.runtime.loading.host import HostOptions


def names(options: HostOptions, graph: str) -> list[str]:
    return [choice.provider.name for choice in options.selection.choices(graph)]


def test_a_provider_may_be_given_per_graph() -> None:
    assert names(HostOptions.parse(), "target") == ["cpu"]
    assert names(HostOptions.parse("cuda"), "head") == ["cuda"]
    mixed = HostOptions.parse(["cuda", "head=cpu"], threads=2)
    assert (names(mixed, "target"), names(mixed, "head")) == (["cuda"], ["cpu"])
    assert mixed.threads == 2


@pytest.mark.parametrize("providers", [(), ["cpu", 3], [b"cpu"]])
def test_what_is_no_provider_is_shown(providers: Any) -> None:
    with pytest.raises(ProviderError) as raised:
        HostOptions.parse(providers)
    assert str(raised.value).startswith(f"provider is {providers!r}; it must be text such as 'cpu'")


def test_as_many_threads_as_four_per_core() -> None:
    most = 4 * (os.cpu_count() or 1)
    for threads in (None, 1, most):
        assert HostOptions(threads=threads).threads == threads


@pytest.mark.parametrize("threads", [0, -1, 4 * (os.cpu_count() or 1) + 1, 1.0, True, "2"])
def test_other_numbers_of_threads_are_refused_with_the_limit(threads: Any) -> None:
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(RequestError) as raised:
        HostOptions(threads=threads)
    assert str(raised.value) == f"threads is {threads!r}; it must be from 1 to {most}, four per core"

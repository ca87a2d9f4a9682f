"""Loads a bundle's graphs, each with the first provider that can run it."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from dspark.providers import PROVIDERS, Choice, LoadOptions, Provider, ProviderError, Selection, Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.model.fixed_shapes import Dimensions, FixedShapeSession, graph_dimensions

__all__ = ["Loaded", "fitting_choices", "load_graphs", "open_sessions"]

Loaded = TypeVar("Loaded")
logger = logging.getLogger(__name__)


def open_sessions(
    bundle: Bundle, host: HostOptions, names: Sequence[str], check_hashes: bool | None = None
) -> dict[str, Session]:
    """``load_graphs`` to run them."""

    def load(provider: Provider, name: str, how: LoadOptions) -> Session:
        def load_shape(dimensions: Dimensions) -> Session:
            return provider.open(bundle.graph(name), replace(how, dimensions=dimensions))

        if provider.needs_static_shapes(how.options):
            return FixedShapeSession(name, graph_dimensions(bundle.manifest, name), load_shape)
        return load_shape({})

    return load_graphs(bundle, host, load, names, check_hashes)


def load_graphs(
    bundle: Bundle,
    host: HostOptions,
    load: Callable[[Provider, str, LoadOptions], Loaded],
    names: Sequence[str],
    check_hashes: bool | None = None,
) -> dict[str, Loaded]:
    """Loads graphs side by side, and checks the files' hashes meanwhile.

    Args:
        bundle: The bundle.
        host: What runs the graphs.
        load: Loads the graph of a name with a provider that may run it.
        names: The graphs to load.
        check_hashes: See ``Bundle.open``.

    Raises:
        BundleError: A file was altered.
        ProviderError: None of the choices can run a graph.
        RequestError: A choice is for a graph that the bundle does not have.
    """
    selection, held = host.selection, bundle.manifest.precision
    for name in selection.graphs:
        if name not in held:
            raise RequestError(f"the provider for {name} would run nothing; this bundle's graphs are {', '.join(held)}")
        if name not in names:
            raise RequestError(f"the provider for {name} would run nothing, because nothing is drafted")
    fitting = {name: fitting_choices(bundle, selection, name) for name in names}

    def load_with(choice: Choice, name: str) -> Loaded:
        how = LoadOptions(host.threads, choice.options, allow_fallback=selection.allow_fallback)
        return load(choice.provider, name, how)

    def load_first(name: str) -> Loaded:
        *others, last = fitting[name]
        for choice in others:
            try:
                return load_with(choice, name)
            except ProviderError as error:
                logger.warning("%s: %s is passed over: %s", name, choice.provider.name, error)
        return load_with(last, name)

    with ThreadPoolExecutor() as pool:
        checked = pool.submit(bundle.check_hashes, check_hashes)
        opened = {name: pool.submit(load_first, name) for name in names}
        checked.result()  # an altered file is the better error than what a session makes of it
        return {name: session.result() for name, session in opened.items()}


def fitting_choices(bundle: Bundle, selection: Selection, name: str) -> list[Choice]:
    """Those of a graph's choices that take its precision and shapes; never empty.

    Raises:
        ProviderError: None does; the message is about the first.
    """
    precision = bundle.manifest.precision[name]
    problems: list[ProviderError] = []
    fitting = []
    for choice in selection.choices(name):
        provider = choice.provider
        missing = [part for part in (precision.linear, precision.tables) if part not in provider.precisions]
        if missing:
            runs = ", ".join(sorted(provider.precisions))
            takers = [other.name for other in PROVIDERS if missing[0] in other.precisions]
            others = f", or run it with {' or '.join(takers)}" if takers else ""
            problems.append(
                ProviderError(
                    f"{provider.name} does not run {missing[0]} (the {name} graph); it runs {runs}: "
                    f"export with one of them{others}"
                )
            )
        elif name == "target" and bundle.manifest.cache_form not in provider.cache_forms:
            problems.append(
                ProviderError(
                    f"{provider.name} cannot write into the cache, as this bundle's target does: "
                    "export with --cache-form delta"
                )
            )
        elif provider.needs_static_shapes(choice.options) and bundle.manifest.shapes is None:
            problems.append(
                ProviderError(
                    f"{provider.name} takes graphs of fixed shapes only, and this bundle's are not (the {name} graph): "
                    "export with --static"
                )
            )
        else:
            fitting.append(choice)
    if not fitting:
        raise problems[0]
    for problem in problems:
        logger.warning("passed over: %s", problem)
    return fitting

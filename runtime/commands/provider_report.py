"""What ``dspark-run providers`` and ``dspark-run inspect`` tell of devices and of what was compiled for them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dspark.providers import PROVIDERS, LoadOptions, PlacedNode, Provider, ProviderError, Selection, added_providers
from dspark.providers.engine_key import ENGINES, EngineKey
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.loading.sessions import load_graphs
from dspark.runtime.model.fixed_shapes import graph_dimensions

__all__ = ["engine_rows", "placement", "provider_rows"]


def provider_rows() -> list[dict[str, Any]]:
    """Every provider, those of other packages last: what it takes, its devices and their load, why it is unusable."""
    return [*map(_row, PROVIDERS), *(_added_row(name, provider) for name, provider in added_providers().items())]


def engine_rows(bundle: Bundle) -> list[dict[str, Any]]:
    """What was compiled ahead of time: for each part its graph and its key.

    Raises:
        ProviderError: A key is damaged.
    """
    rows = []
    for name in bundle.manifest.precision:
        for file in sorted(bundle.path.glob(f"{ENGINES}/*/{bundle.graph(name).stem}*.json")):
            rows.append({"file": file.relative_to(bundle.path).as_posix(), "of": name, **asdict(EngineKey.read(file))})
    return rows


def placement(bundle: Bundle, selection: Selection, threads: int | None) -> Mapping[str, Sequence[PlacedNode]]:
    """Which node of each graph would run where, after the providers' optimisations, if all of them may fall back.

    Raises:
        ProviderError: A provider cannot load a graph, or cannot tell.
    """
    names = list(bundle.manifest.precision)

    def load(provider: Provider, name: str, how: LoadOptions) -> Sequence[PlacedNode]:
        static = provider.needs_static_shapes(how.options)
        dimensions = graph_dimensions(bundle.manifest, name)[-1] if static else {}
        return provider.placement(bundle.graph(name), replace(how, dimensions=dimensions))

    return load_graphs(bundle, selection, load, names, threads, check_hashes=False)


def _row(provider: Provider) -> dict[str, Any]:
    discovery = provider.discover()
    return {
        "name": provider.name,
        "aliases": list(provider.aliases),
        "usable": discovery.problem is None,
        "devices": list(discovery.devices),
        "precisions": sorted(provider.precisions),
        "shapes": "fixed" if provider.static_shapes else "any",
        "options": sorted(provider.options),
        "load": [asdict(load) for load in provider.load()] if discovery.problem is None else [],
        "problem": discovery.problem,
    }


def _added_row(name: str, provider: Provider | ProviderError) -> dict[str, Any]:
    if isinstance(provider, Provider):
        return _row(provider)
    nothing: dict[str, Any] = {key: [] for key in ("aliases", "devices", "precisions", "options", "load")}
    return {"name": name, **nothing, "usable": False, "shapes": "", "problem": str(provider)}

"""What options and a bundle's manifest alone refuse, before any graph is loaded."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.runtime.errors import RequestError

if TYPE_CHECKING:
    from dspark.runtime.bundle.manifest import Manifest
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.loading.serving_profile import ServingProfile
    from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["check_options", "chosen_batch_size", "refuse_given"]


def refuse_given(options: Mapping[str, object], why: str) -> None:
    """Refuses options that another makes meaningless, or that mean nothing without another.

    Args:
        options: Their values; None or False if they are not given.
        why: Ends the message, and names the other.

    Raises:
        RequestError: One is given.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise RequestError(f"{name} {why}")


def check_options(
    bundle: Path,
    params: "SamplingParams",
    rows: Iterable[Mapping[str, Any] | RequestError],
    options: "SpeculationOptions | None" = None,
    profile: str | None = None,
) -> "Manifest":
    """Refuses options that no prompt could be run with; returns the bundle's manifest.

    Args:
        bundle: The bundle's folder.
        params: Sampling options.
        rows: The prompts; an option that one of them sets itself is not checked.
        options: How to speculate, as given.
        profile: A serving profile, by name or file.

    Raises:
        BundleError: The bundle is damaged, or there is none.
        RequestError: The bundle or the profile does not allow an option; names the bundle.
    """
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.loading.serving_profile import find_profile

    manifest, serving = Bundle.open(bundle, check_hashes=False).manifest, find_profile(profile)
    try:
        if options is not None:
            serving.options(manifest, options).resolve(manifest)
        own = {name for row in rows if not isinstance(row, RequestError) for name in row}
        if "max_new_tokens" not in own:
            _check_length(manifest, params.max_new_tokens, serving)
        if "stop" not in own and params.stop and manifest.text.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this bundle has none")
    except RequestError as error:
        raise RequestError(f"{bundle}: {error}") from error
    return manifest


def chosen_batch_size(manifest: "Manifest", given: int | None, default: int) -> int:
    """The number of requests that run at once.

    Args:
        manifest: Of the bundle.
        given: What the user wants; None leaves it open.
        default: Taken then, as far as the bundle's fixed shapes allow.

    Raises:
        RequestError: The bundle's fixed shapes are for fewer, or it is no such number.
    """
    from dspark.runtime.loading.serving import check_batch_size
    from dspark.runtime.model.limits import ModelLimits

    limits = ModelLimits.of(manifest)
    if given is None:
        return min(default, limits.requests)
    check_batch_size(given, limits=limits)
    return given


def _check_length(manifest: "Manifest", tokens: int, profile: "ServingProfile") -> None:
    """Refuses more tokens than there is room for behind the shortest prompt."""
    limit, room = profile.context_length(manifest.context_length), profile.settings.cache_tokens
    if tokens >= limit:
        raise RequestError(f"max_new_tokens is {tokens}; the limit is {limit} with the prompt, which has at least 1")
    if room is not None and tokens >= room:
        raise RequestError(
            f"max_new_tokens is {tokens}; the cache has room for {room} (max_cache_tokens) with the prompt, which has "
            "at least 1"
        )

"""What the shell offers for an option's value; nothing here loads a library or a bundle."""

from typing import get_args

from dspark.configs import serving_profiles
from dspark.providers.names import provider_names
from dspark.runtime.scheduling.names import SchedulerName

__all__ = ["complete_profile", "complete_provider", "complete_schedulers"]


def complete_provider(incomplete: str) -> list[str]:
    """Provider names, also behind ``GRAPH=``."""
    graph, equals, name = incomplete.rpartition("=")
    return [f"{graph}{equals}{each}" for each in provider_names() if each.startswith(name)]


def complete_profile(incomplete: str) -> list[str]:
    """Names of the serving profiles that come with the package; the shell itself completes files."""
    return [name for name in serving_profiles() if name.startswith(incomplete)]


def complete_schedulers(incomplete: str) -> list[str]:
    """The last name of a list with commas."""
    before, comma, name = incomplete.rpartition(",")
    return [f"{before}{comma}{each}" for each in get_args(SchedulerName) if each.startswith(name)]

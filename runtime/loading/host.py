"""What of the host runs a bundle's graphs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.providers import ON_CPU, ProviderError, Selection
from dspark.runtime.errors import RequestError

__all__ = ["HostOptions"]

THREADS_PER_CORE = 4


@dataclass(frozen=True)
class HostOptions:
    """Providers and host threads.

    Attributes:
        selection: Which provider runs which graph, and whether nodes may fall back to the host's CPU.
        threads: Host threads; None: one per core.

    Raises:
        RequestError: There cannot be so many threads.
    """

    selection: Selection = ON_CPU
    threads: int | None = None

    def __post_init__(self) -> None:
        most = THREADS_PER_CORE * (os.cpu_count() or 1)
        if self.threads is not None and (type(self.threads) is not int or not 1 <= self.threads <= most):
            raise RequestError(f"threads is {self.threads!r}; it must be from 1 to {most}, four per core")

    @classmethod
    def parse(
        cls, providers: str | Sequence[str] | None = None, *, allow_fallback: bool = False, threads: int | None = None
    ) -> "HostOptions":
        """Reads what users write.

        Args:
            providers: As after ``--provider``, see ``Selection.parse``; None: the CPU.
            allow_fallback: Whether nodes that a device cannot run may run on the host's CPU.
            threads: Host threads; None: one per core.

        Raises:
            ProviderError: A provider or an option is unknown, or has another form.
            RequestError: There cannot be so many threads.
        """
        given = "cpu" if providers is None else providers
        texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ProviderError(f"provider is {providers!r}; it must be text such as 'cpu' or 'target=cuda', or a list")
        return cls(Selection.parse(texts, allow_fallback=allow_fallback), threads)

"""``dspark-run providers``: what can run graphs on this host."""

import json

from rich.console import Console

from dspark.runtime.commands.options import Json

__all__ = ["providers"]


def providers(as_json: Json = False) -> None:
    """Lists the providers, their devices, and why one cannot be used."""
    from dspark.runtime.commands.display import show_providers
    from dspark.runtime.commands.provider_report import provider_rows

    rows = provider_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show_providers(rows, Console())

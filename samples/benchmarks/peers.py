"""Races this project against its peers on the same prompts; ``prepare.py`` installs them."""

import json
import os
import platform
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from contestants import CONTESTANTS, Contestant, Folders, ours
from protocol import Request
from race import run
from results import as_dict, show, standings
from rich.console import Console

from dspark.runtime import DSparkError, SpeculationOptions
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.rows import read_rows
from dspark.runtime.text.tokenizer import TextProcessor

PROMPTS = sorted((Path(__file__).parent.parent / "prompts").glob("*.jsonl"))


def main(
    environments: Annotated[Path, typer.Option(help="The folder that prepare.py filled.")],
    bundle: Annotated[
        list[str], typer.Option(help="NAME=BUNDLE, several times; the first, run plainly, is compared with.")
    ],
    prompts: Annotated[list[Path], typer.Option(help="JSONL files with a prompt in each row.")] = PROMPTS,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="Host threads of each contestant.")] = os.cpu_count() or 1,
    confidence_threshold: Annotated[float | None, typer.Option(help="See dspark-run.")] = None,
    max_draft_tokens: Annotated[int | None, typer.Option(help="See dspark-run.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Peers that take part, by name; by default all.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write all figures there as JSON.")] = None,
) -> None:
    """Runs the race and prints who is how fast."""
    console = Console()
    try:
        bundles = dict(_named(text) for text in bundle)
        speculation = SpeculationOptions(None, max_draft_tokens, confidence_threshold)
        own = [one for name, path in bundles.items() for one in ours(name, path, speculation)]
        peers = _peers(Folders(environments), only)
        reference = Bundle.open(next(iter(bundles.values())), check_hashes=False)
        pairs = [pair for path in prompts for pair in islice(_requests(path, reference, max_new_tokens), samples)]
    except (DSparkError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    datasets, requests = [name for name, _ in pairs], [request for _, request in pairs]
    racing = [*own, *[peer for peer in peers if peer.installed]]
    with console.status("Loading") as status:
        results = run(racing, requests, threads, lambda text: status.update(text))
    found = standings(results, datasets)
    absent = [peer.name for peer in peers if not peer.installed]
    show(console, found, absent)
    if output is not None:
        settings = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "threads": threads,
            "max_new_tokens": max_new_tokens,
            "prompts": datasets,
            "prompt_tokens": [len(request.prompt_ids) for request in requests],
        }
        output.write_text(json.dumps({"settings": settings, **as_dict(found, absent)}, indent=1), encoding="utf-8")


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--bundle {text}: write NAME=BUNDLE")
    return name, Path(path)


def _peers(folders: Folders, only: list[str] | None) -> list[Contestant]:
    for name in only or ():
        if name not in CONTESTANTS:
            raise ValueError(f"there is no peer {name!r}; there are {', '.join(map(repr, CONTESTANTS))}")
    return [CONTESTANTS[name].contestant(name, folders) for name in (CONTESTANTS if only is None else only)]


def _requests(path: Path, bundle: Bundle, max_new_tokens: int) -> Iterator[tuple[str, Request]]:
    """A file's prompts as the bundle's tokenizer and chat template write them: every contestant gets the same ids."""
    text = bundle.manifest.text
    if text.tokenizer is None or text.chat_template is None:
        raise ValueError(f"{bundle.path} has no tokenizer or no chat template")
    processor = TextProcessor(bundle.text(text.tokenizer), bundle.text(text.chat_template), text.special_tokens)
    stop_token_ids = list(bundle.manifest.target.stop_token_ids)
    for row in read_rows(path.read_bytes().splitlines()):
        if isinstance(row, DSparkError):
            raise row
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"{path}: a row must have a prompt: {json.dumps(row)[:60]}")
        prompt_ids = processor.encode_chat([{"role": "user", "content": row["prompt"]}])
        yield path.stem, Request(prompt_ids, max_new_tokens, stop_token_ids)


if __name__ == "__main__":
    typer.run(main)

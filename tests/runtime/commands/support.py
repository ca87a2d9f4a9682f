"""What the tests of several commands need."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from dspark.runtime import SamplingParams
from tests.support.golden_models import load

__all__ = ["COMMAND", "GoldenBundle", "expected", "jsonl"]

GoldenBundle: TypeAlias = Callable[[str], Path]

COMMAND = [sys.executable, "-c", "from dspark.runtime.commands.app import main; main()"]


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def expected(bundle: Path, prompt: Sequence[int] | str, **options: Any) -> tuple[str | None, list[int]]:
    completion = loaded(bundle).generate([prompt], SamplingParams(**options))[0]
    return completion.text, completion.token_ids


loaded = cache(load)

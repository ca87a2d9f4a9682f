"""``dspark-run`` called in the tests' own process."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from dspark.runtime.commands.app import main

__all__ = ["Result", "Run", "runner"]

COMPUTING = {"generate", "chat", "bench", "profile", "evaluate", "calibrate", "compare"}


@dataclass(frozen=True)
class Result:
    """What a run of the command line left."""

    code: int
    out: str
    error: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSONL."""
        return [json.loads(line) for line in self.out.splitlines()]


Run: TypeAlias = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Makes a function that runs a command on one thread."""

    def run(*arguments: str | Path, stdin: str | bytes = "") -> Result:
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        threads = ["--threads", "1"] if COMPUTING & {*arguments[:1]} else []
        monkeypatch.setattr(sys, "argv", ["dspark-run", *map(str, arguments[:1]), *threads, *map(str, arguments[1:])])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        monkeypatch.setenv("COLUMNS", "200")
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return run

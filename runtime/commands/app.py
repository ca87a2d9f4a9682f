"""``dspark-run``: its commands, and what becomes of errors.

Each command has a file of its own. It imports the libraries that it computes with when it runs, so help and shell
completion wait for none.
"""

import sys

import typer

from dspark.runtime.commands.bench import bench
from dspark.runtime.commands.calibrate import calibrate
from dspark.runtime.commands.chat import chat
from dspark.runtime.commands.compare import compare
from dspark.runtime.commands.evaluate import evaluate
from dspark.runtime.commands.generate import generate
from dspark.runtime.commands.inspect import inspect
from dspark.runtime.commands.profile import profile
from dspark.runtime.commands.providers import providers
from dspark.runtime.commands.terminal import print_error
from dspark.runtime.errors import DSparkError
from dspark.runtime.reports.version import Version

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for command in (generate, chat, inspect, providers, bench, profile, evaluate, calibrate, compare):
    app.command()(command)


@app.callback()
def options(version: Version = False) -> None:
    """Runs bundles made by dspark-export."""


def main() -> None:
    """Runs the command line; an error of ours becomes one line and exit code 1."""
    try:
        app(prog_name="dspark-run")
    except (DSparkError, UnicodeEncodeError) as error:
        print_error(str(error))
        sys.exit(1)
    except OSError as error:
        print_error(f"the output cannot be written: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

"""``optimum-cli export dspark …`` is ``dspark-export …``.

Optimum finds this file in its namespace ``optimum.commands.register``, where the wheel installs it.
"""

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

__all__ = ["REGISTER_COMMANDS"]


class DSparkExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """Hands everything on the command line to ``dspark-export``."""

    COMMAND = CommandInfo(name="dspark", help="Export a model and a drafter for speculative decoding without PyTorch.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Takes all arguments as they are, options and ``--help`` included."""
        parser.prefix_chars = "\0"
        parser.add_argument("arguments", nargs="*")

    def run(self) -> None:
        """Exports."""
        from dspark.exporter.cli import main  # Optimum loads this file whatever it is asked for

        main(self.args.arguments)


REGISTER_COMMANDS = [(DSparkExportCommand, ExportCommand)]
"""What Optimum reads: the command and its parent."""

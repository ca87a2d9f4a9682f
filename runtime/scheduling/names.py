"""Names of the schedulers, which the command line completes without loading them."""

from typing import Literal, TypeAlias

__all__ = ["SchedulerName"]

SchedulerName: TypeAlias = Literal["hardware", "hardware-async", "threshold", "fixed", "off"]

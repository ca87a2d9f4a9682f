"""Types of arguments at the boundary of the Python API, which callers without a type checker may mistake."""

import reprlib

from dspark.runtime.errors import RequestError

__all__ = ["check_argument"]


def check_argument(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses a value of another type.

    Truth values are no numbers here, though Python derives them from whole numbers.

    Args:
        name: What the caller calls it.
        value: What was given.
        kinds: The types that are right; ``type(None)`` among them if None stands for something.
        wanted: What it must be, in words.

    Raises:
        RequestError: It is of none of the types; names the argument and its value.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise RequestError(f"{name} is {reprlib.repr(value)}; it must be {wanted}")

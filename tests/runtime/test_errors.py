"""Errors are one family."""

from dspark.runtime import BundleError, DSparkError


def test_errors_have_one_root() -> None:
    assert issubclass(BundleError, DSparkError)

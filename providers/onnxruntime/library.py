"""The installed ONNX Runtime, and the libraries that add execution providers to it.

Source: onnxruntime.ai, "Using a Plugin Execution Provider Library".
"""

import threading
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Any

from dspark.providers.errors import PluginError, ProviderError, one_line

__all__ = ["Plugin", "import_onnxruntime"]

INSTALL_HINT = (
    "ONNX Runtime is not installed; install one build of it with an extra, for example "
    "pip install 'dspark-onnx[cpu]' (others: cuda, tensorrt, openvino, qnn, cann)"
)
_registering = threading.Lock()


def import_onnxruntime() -> Any:
    """The installed build of ONNX Runtime.

    Raises:
        ProviderError: There is none.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(INSTALL_HINT) from error
    return onnxruntime


@dataclass(frozen=True)
class Plugin:
    """The package that brings an execution provider as a library.

    Attributes:
        module: Its module.
        distribution: Its name for pip.
        devices: What the library drives, for the error when none is there.
        locate: The module's function that tells where the library lies.
    """

    module: str
    distribution: str
    devices: str
    locate: str = "get_library_path"

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """The package's version."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "of unknown version"

    def register(self, runtime: Any, name: str) -> None:
        """Makes ONNX Runtime load the library, once a process.

        Raises:
            PluginError: The library is missing or does not fit this ONNX Runtime.
        """
        with _registering:
            if any(device.ep_name == name for device in runtime.get_ep_devices()):
                return
            path = "its library"
            try:
                path = str(getattr(import_module(self.module), self.locate)())
                runtime.register_execution_provider_library(name, path)
            except Exception as error:  # the binding raises its own classes, which share no public base
                if "already registered" in str(error):  # but it drives no device here
                    return
                raise PluginError(
                    f"{path}: {self.distribution} {self.version} cannot be loaded by ONNX Runtime "
                    f"{runtime.__version__}: {one_line(error)}; install versions of both that fit each other"
                ) from error

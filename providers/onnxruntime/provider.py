"""Providers that ONNX Runtime brings, built in or as plug-in libraries.

Source: onnxruntime.ai, "Execution Providers".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dspark.providers.engine_key import ENGINES, EngineKey, graph_hash
from dspark.providers.errors import ProviderError, one_line
from dspark.providers.onnxruntime.library import Plugin, import_onnxruntime
from dspark.providers.onnxruntime.session import OnnxRuntimeSession
from dspark.providers.provider import (
    DEFAULT_LOADING,
    NOTHING,
    CompileOptions,
    Discovery,
    LoadOptions,
    Options,
    Provider,
)
from dspark.providers.session import PlacedNode, ProfiledSession, Session

__all__ = ["SHAPE_OPERATORS", "OnnxRuntimeProvider"]

HOST = "CPUExecutionProvider"
STRICT = {"session.disable_cpu_ep_fallback": "1"}
RECORDED = {"session.record_ep_graph_assignment_info": "1"}
FALLBACK_REFUSED = "fallback to CPU EP has been explicitly disabled"
"""What ONNX Runtime says when strict placement fails; it does not say which nodes it is about."""
SHOWN = 12
"""Fallen nodes that an error names."""
SHAPE_OPERATORS = frozenset({"Shape", "Size", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Range"})
"""What shapes are computed with: ONNX Runtime keeps these on the host beside providers that run kernel by kernel."""


@dataclass(frozen=True, kw_only=True)
class OnnxRuntimeProvider(Provider):
    """An execution provider of ONNX Runtime.

    Attributes:
        execution_provider: Its name in ONNX Runtime.
        plugin: The package that brings it to builds of ONNX Runtime without it; None if there is none.
        defaults: Options that are passed unless the user gives others.
        host_operators: Operators that ONNX Runtime itself keeps on the host beside this provider, because they compute
            shapes; strict placement tolerates these and no others.
        run_options: Options that a compiled model does not depend on, so they may be others when it runs.
    """

    execution_provider: str
    plugin: Plugin | None = None
    defaults: tuple[tuple[str, str], ...] = ()
    host_operators: frozenset[str] = frozenset()
    run_options: frozenset[str] = frozenset()

    def discover(self) -> Discovery:
        """Looks for the execution provider and its devices; never raises."""
        try:
            devices = self._devices(import_onnxruntime())
        except ProviderError as error:
            return Discovery(problem=str(error))
        return Discovery(tuple(map(_describe, devices)) or tuple(load.device for load in self.load()))

    def device_name(self, options: Options = NOTHING) -> str | None:
        """Name of the device; see ``Provider.device_name``."""
        return None if self.execution_provider == HOST else super().device_name(options)

    def open(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Session:
        """Loads a graph, or what it was compiled into ahead of time; see ``Provider.open``."""
        return self._open(*self._found(model, how))

    def require_compiler(self, options: Options = NOTHING) -> None:
        """Needs the execution provider and its device, and that it does not run a graph kernel by kernel."""
        self.check_options(options)
        if self.execution_provider == HOST or self.host_operators:
            raise ProviderError(f"{self.name} runs graphs kernel by kernel and compiles nothing ahead of time")
        self._devices(import_onnxruntime())

    def compile(self, model: Path, how: CompileOptions) -> str:
        """Writes an EPContext model and its key for each shape; see ``Provider.compile``.

        Ctrl-C ends it after the shape under way: a call of the library cannot be broken off.
        """
        shapes = how.shapes or ({},)
        for count, dimensions in enumerate(shapes, 1):
            how.on_phase(f"shape {count} of {len(shapes)}")
            key = self._compile_shape(model, how.precision, LoadOptions(options=how.options, dimensions=dimensions))
        built = f"{len(shapes)} {'shape' if len(shapes) == 1 else 'shapes'}"
        return f"{key.backend} ({key.device}) with {key.version}: {built}"

    def profile(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> ProfiledSession:
        """Loads a graph with ONNX Runtime's profiler."""
        return self._open(*self._found(model, how), folder=TemporaryDirectory())

    def placement(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Sequence[PlacedNode]:
        """Which node of a graph would run where, after ONNX Runtime's optimisations."""
        return self._create(*self._found(model, how), RECORDED).placed_nodes()

    def default_options(self, threads: int | None) -> dict[str, str]:
        """Options that are passed unless the user gives others."""
        return dict(self.defaults)

    def select(self, devices: Sequence[Any], options: Options) -> tuple[Sequence[Any], dict[str, str]]:
        """Which of a plug-in's devices a session uses, and the options that go to ONNX Runtime with them."""
        return devices[:1], dict(options)

    def wrap(
        self, model: Path, session: Any, how: LoadOptions, folder: "TemporaryDirectory[str] | None"
    ) -> OnnxRuntimeSession:
        """What the runtime sees of an ``onnxruntime.InferenceSession``."""
        return OnnxRuntimeSession(model, session, folder)

    def configure(self, model: Path, session_options: Any) -> None:
        """Changes ONNX Runtime's session options for a graph, for providers that need it."""

    def compiled_device(self, options: Options) -> str:
        """The device of a key: the options that a compiled model depends on."""
        passed = sorted({**dict(self.defaults), **options}.items())
        return ", ".join(f"{name}={value}" for name, value in passed if name not in self.run_options)

    def _compile_shape(self, model: Path, precision: str, how: LoadOptions) -> EngineKey:
        """Compiles a graph, and loads the result once: a model that this host cannot load is of no use."""
        compiled = self._compiled_file(model, how)
        compiled.parent.mkdir(parents=True, exist_ok=True)
        context = {
            "ep.context_enable": "1",
            "ep.context_file_path": str(compiled),
            "ep.context_embed_mode": "0",  # a file of its own may be larger than 2 GiB
        }
        self._open(model, how, config=context)
        if not compiled.is_file():
            raise ProviderError(f"{model}: {self.execution_provider} does not write compiled models")
        try:
            self._open(compiled, replace(how, dimensions={}))
        except ProviderError as error:
            raise ProviderError(f"{model}: was compiled, but the result cannot be loaded: {error}") from error
        key = EngineKey(**self._built_for(how), graph=graph_hash(model), precision=precision, layers=None)
        key.write(compiled.with_suffix(".json"))
        return key

    def _found(self, model: Path, how: LoadOptions) -> tuple[Path, LoadOptions]:
        """What to load for a graph, and how; of a compiled model all dimensions are fixed already."""
        compiled = self._compiled_file(model, how)
        if compiled.is_file():
            key, here = EngineKey.read(compiled.with_suffix(".json")), self._built_for(how)
            key.check(compiled, here, f"compile it with dspark-export --compile {self.name}")
            return compiled, replace(how, dimensions={})
        engines = model.parent / ENGINES
        if engines.is_dir() and not model.is_file():
            keys = sorted(file.relative_to(engines).as_posix() for file in engines.glob(f"*/{model.stem}*.json"))
            raise ProviderError(
                f"{model}: is gone, and there is no {self.name}/{compiled.name} but {', '.join(keys) or 'nothing'} in "
                f"{ENGINES}: run it with the provider that it was compiled for, or export it again"
            )
        return model, how

    def _compiled_file(self, model: Path, how: LoadOptions) -> Path:
        sizes = "".join(f"-{name}{size}" for name, size in how.dimensions.items() if name.isalpha())
        return model.parent / ENGINES / self.name / f"{model.stem}{sizes}.onnx"

    def _built_for(self, how: LoadOptions) -> dict[str, Any]:
        """The part of a key that says where and how a compiled model may run."""
        version = f"onnxruntime {import_onnxruntime().__version__}"
        if self.plugin is not None and self.plugin.installed:
            version += f", {self.plugin.distribution} {self.plugin.version}"
        return {
            "backend": self.name,
            "version": version,
            "device": self.compiled_device(how.options),
            "profiles": {"fixed": {name: [size] * 3 for name, size in how.dimensions.items()}},
        }

    def _open(
        self,
        model: Path,
        how: LoadOptions,
        *,
        folder: "TemporaryDirectory[str] | None" = None,
        config: Mapping[str, str] = NOTHING,
    ) -> OnnxRuntimeSession:
        if how.allow_fallback or self.execution_provider == HOST:
            return self._create(model, how, config, folder)
        if self.host_operators:
            session = self._create(model, how, {**config, **RECORDED}, folder)
            self._refuse_fallen(model, session)
            return session
        try:
            return self._create(model, how, {**config, **STRICT}, folder)
        except ProviderError as error:
            if FALLBACK_REFUSED not in str(error):
                raise
            self._refuse_fallen(model, self._create(model, how, RECORDED))
            raise

    def _refuse_fallen(self, model: Path, session: OnnxRuntimeSession) -> None:
        fallen = [
            node
            for node in session.placed_nodes()
            if node.provider != self.execution_provider and node.operator not in self.host_operators
        ]
        if fallen:
            names = ", ".join(f"{node.name} ({node.operator})" for node in fallen[:SHOWN])
            more = f" and {len(fallen) - SHOWN} more" if len(fallen) > SHOWN else ""
            raise ProviderError(
                f"{model}: {self.name} cannot run {len(fallen)} of the graph's nodes: {names}{more}; "
                "they would run on the host's CPU, which dspark-run's --allow-fallback permits"
            )

    def _create(
        self,
        model: Path,
        how: LoadOptions,
        config: Mapping[str, str],
        folder: "TemporaryDirectory[str] | None" = None,
    ) -> OnnxRuntimeSession:
        self.check_options(how.options)
        runtime = import_onnxruntime()
        devices = self._devices(runtime)
        session_options = runtime.SessionOptions()
        session_options.log_severity_level = 4  # errors are raised
        if how.threads is not None:
            session_options.intra_op_num_threads = how.threads
        if folder is not None:
            session_options.enable_profiling = True
            session_options.profile_file_prefix = str(Path(folder.name) / model.stem)
        # The sessions of a bundle take turns on the same cores: workers must not spin into the next one's run.
        session_options.add_session_config_entry("session.force_spinning_stop", "1")
        for name, value in config.items():
            session_options.add_session_config_entry(name, value)
        for name, size in how.dimensions.items():
            session_options.add_free_dimension_override_by_name(name, size)
        self.configure(model, session_options)
        passed = {**self.default_options(how.threads), **how.options}
        arguments: dict[str, Any] = {"enable_fallback": 0}
        try:
            if devices:
                chosen, passed = self.select(devices, passed)
                session_options.add_provider_for_devices(chosen, passed)
            else:
                arguments["providers"] = [(self.execution_provider, passed)]
            session = runtime.InferenceSession(str(model), session_options, **arguments)
        except ProviderError:
            raise
        except Exception as error:  # the binding raises its own classes, which share no public base
            raise ProviderError(
                f"{model}: {self.execution_provider} cannot load the graph: {one_line(error)}"
            ) from error
        if self.execution_provider not in session.get_providers():  # its device or a library of it is missing
            raise ProviderError(
                f"{model}: {self.execution_provider} did not start, and ONNX Runtime would use "
                f"{', '.join(session.get_providers())} instead; {self.install}"
            )
        return self.wrap(model, session, how, folder)

    def _devices(self, runtime: Any) -> Sequence[Any]:
        """The plug-in's devices; none if the provider is built into ONNX Runtime.

        Raises:
            ProviderError: The provider is not installed or drives none of the host's devices.
        """
        available = runtime.get_available_providers()
        if self.plugin is None or not self.plugin.installed:
            if self.execution_provider in available:
                return ()
            raise ProviderError(
                f"{self.execution_provider} is not in this ONNX Runtime ({', '.join(available)}); {self.install}"
            )
        self.plugin.register(runtime, self.execution_provider)
        devices = [device for device in runtime.get_ep_devices() if device.ep_name == self.execution_provider]
        if not devices:
            raise ProviderError(
                f"{self.plugin.distribution} {self.plugin.version} is installed, but there is no device "
                f"that it drives ({self.plugin.devices})"
            )
        return devices


def _describe(device: Any) -> str:
    hardware = device.device
    name = device.ep_metadata.get("ov_device") or hardware.type.name
    return f"{name} ({hardware.vendor or device.ep_vendor})"

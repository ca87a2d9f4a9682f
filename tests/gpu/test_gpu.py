"""The whole loop on an NVIDIA GPU: export, compile, generate, and compare with the CPU in float32."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark.exporter.compile import Compilation
from dspark.exporter.export import Export, export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import Choice, LoadOptions, ProviderError
from dspark.providers.cuda.graph import CAPTURED_AFTER, OPTION
from dspark.providers.cuda.memory import Cuda
from dspark.providers.cuda.provider import CUDA
from dspark.providers.session import DeviceSession
from dspark.runtime import Completion, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.model.target import TokenRun
from dspark.runtime.scheduling.options import SchedulerName
from tests.conftest import GOLDEN, ROOT
from tests.providers.test_cuda import in_place_graph

pytestmark = pytest.mark.gpu

TOLERANCES = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 6e-2}
"""Of logits, as a share of the largest: float32 may be rounded to TF32 by a GPU, bfloat16 has 8 bits."""
NAMES = ("cuda", "tensorrt", "tensorrt-rtx")
GPU = [(name, precision) for name in NAMES for precision in ("fp16", "bf16")]
WITH_GRAPHS = [(f"{name}:{OPTION}=1", "fp16") for name in NAMES]
PROMPTS = ("Give three reasons why the sky is blue.", "Write a haiku about the sea.", "What is 17 times 23?")
NEW_TOKENS = 48


def require(provider: str) -> None:
    """Skips the test where a provider cannot be used; the reason is shown."""
    if provider == "cpu":
        return
    try:
        Cuda()
        if provider.startswith("tensorrt"):
            Compilation.of(Choice.parse(provider), golden_export(Path("unused")), 1, None)
        elif "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise ProviderError("this ONNX Runtime has no CUDAExecutionProvider")
    except ProviderError as error:
        pytest.skip(str(error))


def golden_export(output: Path, precision: str = "fp32") -> Export:
    profile = PrecisionProfile.of(Precision(precision))
    return prepare(GOLDEN / "qwen3_target", GOLDEN / "dspark_gated", output, precision=profile)


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str, str], Path]:
    """Exports a model in a precision, and compiles it if the provider wants that, once."""

    @cache
    def export(model: str, provider: str, precision: str) -> Path:
        output = tmp_path_factory.mktemp(f"{model}-{provider}-{precision}") / "bundle"
        if model == "golden":
            plan = golden_export(output, precision)
        else:
            target, drafter = request.getfixturevalue("smollm2_gguf"), ROOT / "samples" / "smollm2" / "drafter"
            plan = prepare(target, drafter, output, precision=PrecisionProfile.of(Precision(precision)))
        if provider.startswith("tensorrt"):
            compilation = Compilation.of(Choice.parse(provider), plan, 4, min(1024, plan.target.context_length))
            export_bundle(plan, compile_graphs=compilation.run)
        else:
            export_bundle(plan)
        return output

    return export


def load(bundle: Path, provider: str, scheduler: SchedulerName) -> DSparkInference:
    options = SpeculationOptions(scheduler)
    return DSparkInference.load(bundle, provider=provider, batch_size=1, max_sequence_length=500, options=options)


def logits(bundle: Path, provider: str, ids: list[int]) -> NDArray[np.float32]:
    """Of every token of a text, ``[n, V]``."""
    target = load(bundle, provider, "off").engine._target
    return target.verify([TokenRun(ids, len(ids))]).scores.rows.copy()


@cache
def generate(bundle: Path, provider: str, scheduler: SchedulerName) -> tuple[Completion, ...]:
    """Greedily, one after the other; a first request warms up."""
    model = load(bundle, provider, scheduler)
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    model.generate(PROMPTS[:1], params)
    return tuple(model.generate([prompt], params)[0] for prompt in PROMPTS)


def speed(completions: Sequence[Completion]) -> str:
    return f"{fmean(completion.stats.tokens_per_second for completion in completions):.0f}"


@pytest.mark.parametrize("model", ["golden", "smollm2"])
@pytest.mark.parametrize(("provider", "precision"), [("cpu", "fp32"), ("cuda", "fp32"), *GPU, *WITH_GRAPHS])
def test_the_loop(
    model: str,
    provider: str,
    precision: str,
    exported: Callable[[str, str, str], Path],
    add_row: Callable[..., None],
) -> None:
    require(provider)
    bundle, reference = exported(model, provider.partition(":")[0], precision), exported(model, "cpu", "fp32")
    ids = DSparkInference.load(reference).encode(PROMPTS[0])
    expected, found = logits(reference, "cpu", ids), logits(bundle, provider, ids)
    off = float(np.abs(found - expected).max() / np.abs(expected).max())

    wanted = generate(reference, "cpu", "fixed")
    done, plain = generate(bundle, provider, "fixed"), generate(bundle, provider, "off")
    same = sum(one.token_ids == other.token_ids for one, other in zip(done, wanted, strict=True))
    acceptance, usual = (fmean(each.stats.acceptance_length for each in completions) for completions in (done, wanted))
    add_row(
        model=model,
        provider=provider,
        precision=precision,
        logits_off_by=f"{off:.2%}",
        same_outputs=f"{same} of {len(PROMPTS)}",
        acceptance_length=f"{acceptance:.2f}",
        tokens_s=speed(done),
        plain=speed(plain),
    )
    assert off <= TOLERANCES[precision]
    assert abs(acceptance / usual - 1) <= 0.05


def test_device_memory() -> None:
    require("cuda")
    values = np.random.default_rng(0).normal(size=(3, 2, 4, 64, 16)).astype(np.float32)
    array = Cuda().zeros(values.shape, np.float32)
    assert not array.read().any()
    array[:] = values
    array[0, 1] = array[2, 0]
    array[1, :, 1:3] = -values[1, :, 1:3]
    array[2, 1, 3, :, 4:9] = 0
    values[0, 1] = values[2, 0]
    values[1, :, 1:3] *= -1
    values[2, 1, 3, :, 4:9] = 0
    np.testing.assert_array_equal(array.read(), values)


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_a_cache_on_the_device_is_written_in_place(graphs: str, tmp_path: Path) -> None:
    require("cuda")
    session = CUDA.open(in_place_graph(tmp_path), LoadOptions(options={OPTION: graphs}))
    assert isinstance(session, DeviceSession)
    cache = session.device_array((3, 2, 8, 4), np.float32)
    part = cache[1:3]
    new, row, total = np.zeros((2, 2, 1, 4), np.float32), np.zeros(2, np.int64), np.zeros((), np.float32)
    call = session.bind({"past": part, "new": new, "row": row}, {"present": part, "total": total})
    rows = [0] * 8
    for step in range(CAPTURED_AFTER + 3):
        new[:], row[:] = step + 1, step % 8
        rows[step % 8] = step + 1
        call.run()
        assert total == 16 * sum(rows)
    assert cache.read()[:, 0, :, 0].tolist() == [[0] * 8, rows, rows]

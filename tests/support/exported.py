"""Bundles of test checkpoints: made by the real exporter, run by the real runtime, compared with the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.export import export_bundle, prepare
from dspark.providers import Call, Session
from dspark.runtime import Bundle, Completion, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.sessions import open_sessions
from tests.reference import Decoding, Draft, ReferenceDrafter, ReferenceTarget, decode

__all__ = ["Pair", "Recorder", "Recording", "assert_close", "assert_same_decoding", "assert_same_rounds", "export"]

Array = NDArray[Any]


def export(target: Path, drafter: Path | None, output: Path, **options: Any) -> Path:
    """Exports a bundle to ``output`` and returns it."""
    export_bundle(prepare(target, drafter, output, **options))
    return output


def assert_close(actual: Array, expected: Array, tolerance: float = 1e-4) -> None:
    """Both have the same shape and differ by at most ``tolerance`` of the largest expected value."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# The runtime, with every call of a graph written down


@dataclass(frozen=True)
class Recording:
    """One call: what the graph read (without cache rows) and wrote."""

    graph: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Recorder:
    """A bundle's graphs on the CPU provider.

    Attributes:
        calls: Grows with every call of a graph.
    """

    def __init__(self, bundle: Path) -> None:
        self.bundle = Bundle.open(bundle)
        self.calls: list[Recording] = []
        names = list(self.bundle.manifest.precision)
        opened = open_sessions(self.bundle, HostOptions(threads=1), names)
        self._sessions: dict[str, Session] = {
            name: _RecordingSession(name, session, self.calls) for name, session in opened.items()
        }

    def model(self, options: SpeculationOptions | None = None, batch_size: int = 1) -> DSparkInference:
        """The runtime over these graphs."""
        use = ServingOptions(options or SpeculationOptions("fixed"), batch_size)
        return DSparkInference(LoadedModel(self.bundle, self._sessions), use)

    def outputs(self, graph: str) -> list[Mapping[str, Array]]:
        """What the calls of a graph wrote."""
        return [call.outputs for call in self.calls if call.graph == graph]


@dataclass
class _RecordingSession:
    graph: str
    session: Session
    calls: list[Recording]

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        small = {name: array for name, array in inputs.items() if not name.startswith(("past.", "context."))}
        return _RecordingCall(self, self.session.bind(inputs, outputs), small, outputs)


@dataclass
class _RecordingCall:
    session: _RecordingSession
    call: Call
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    def run(self) -> None:
        inputs = {name: array.copy() for name, array in self.inputs.items()}
        self.call.run()
        outputs = {name: array.copy() for name, array in self.outputs.items()}
        self.session.calls.append(Recording(self.session.graph, inputs, outputs))


# A bundle and the reference of its checkpoints


@dataclass
class Pair:
    """Checkpoints, their bundle and their reference.

    Attributes:
        graphs: The bundle, made from the two folders.
        target: The reference target.
        drafter: The reference drafter.
    """

    graphs: Recorder
    target: ReferenceTarget
    drafter: ReferenceDrafter

    @classmethod
    def make(cls, target: Path, drafter: Path, output: Path, steps: int | None = None) -> "Pair":
        """Exports and reads both folders; ``steps`` as for ``ReferenceDrafter``."""
        reference = ReferenceTarget(target)
        return cls(Recorder(export(target, drafter, output)), reference, ReferenceDrafter(drafter, reference, steps))

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, threshold: float | None = None, batch_size: int = 1
    ) -> list[Completion]:
        """Greedy completions of the runtime."""
        self.graphs.calls.clear()
        options = SpeculationOptions("fixed" if threshold is None else "threshold", confidence_threshold=threshold)
        model = self.graphs.model(options, batch_size)
        return model.generate(prompts, SamplingParams(max_new_tokens=count))


def assert_same_decoding(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    count: int = 12,
    threshold: float | None = None,
    stop: Sequence[int] = (),
    tolerance: float = 1e-4,
) -> list[Decoding]:
    """Runtime and reference decode alike: one prompt alone every value of every round, a batch every decision.

    Returns:
        What the reference decoded.
    """
    decoded = []
    for prompt in prompts:
        forward, draft = _Watched(pair.target.forward), _Watched(pair.drafter.draft)
        watched: tuple[Any, Any] = (
            SimpleNamespace(forward=forward),
            SimpleNamespace(draft=draft, taps=pair.drafter.taps),
        )
        expected = decode(*watched, prompt, count, threshold, stop)
        completion = pair.generate([prompt], count, threshold)[0]
        assert_same_rounds(completion, expected)
        logits = [logits for logits, _ in forward.returned[1:]]  # the first pass is the prompt's
        lengths = expected.proposal_lengths
        _assert_same_values(pair.graphs, completion, count, draft.returned, logits, lengths, tolerance)
        _assert_plain(pair.target, prompt, expected.output)
        decoded.append(expected)
    batch = pair.generate(prompts, count, threshold, batch_size=max(2, len(prompts) - 1))  # one must wait
    for completion, expected in zip(batch, decoded, strict=True):
        assert_same_rounds(completion, expected)
    return decoded


def assert_same_rounds(completion: Completion, expected: Decoding) -> None:
    """The same tokens, and the same drafts verified and accepted in every round; the last one may be cut."""
    stats = completion.stats
    assert completion.token_ids == expected.output
    assert stats.rounds == len(expected.proposal_lengths)
    assert stats.draft_lengths[:-1] == expected.proposal_lengths[:-1]
    assert stats.accepted_lengths[:-1] == expected.accepted_draft_lengths[:-1]
    if stats.rounds:
        assert stats.draft_lengths[-1] <= expected.proposal_lengths[-1]
        assert stats.accepted_lengths[-1] <= expected.accepted_draft_lengths[-1]


@dataclass
class _Watched:
    """A function whose results are kept."""

    function: Callable[..., Any]
    returned: list[Any] = field(default_factory=list)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.returned.append(self.function(*arguments, **named))
        return self.returned[-1]


def _assert_same_values(
    graphs: Recorder,
    completion: Completion,
    count: int,
    drafts: Sequence[Draft],
    logits: Sequence[Array],
    proposal_lengths: Sequence[int],
    tolerance: float,
) -> None:
    """Drafts and the target's logits in every round of a request that was alone."""
    rounds = completion.stats.rounds
    if rounds == 0:
        return
    for output, expected, length in zip(graphs.outputs("target")[-rounds:], logits, proposal_lengths, strict=True):
        verified = output["logits"]  # the last round may verify fewer tokens than the reference does
        assert_close(verified, expected[len(expected) - 1 - length :][: len(verified)], tolerance)
    before_last = rounds + sum(completion.stats.accepted_lengths[:-1])
    drafted = drafts[: rounds - (before_last == count - 1)]  # a last token needs no draft
    blocks = graphs.outputs("drafter")[-len(drafted) :]
    heads = graphs.outputs("head") or [{}] * len(drafted)
    for block, head, expected in zip(blocks, heads, drafted, strict=True):
        values = {**block, **head}
        assert values["tokens"][0].tolist() == expected.tokens
        assert_close(values["draft_logits"][0], expected.logits, tolerance)
        if "hidden" in values:
            assert_close(values["hidden"][0], expected.hidden, tolerance)
            assert_close(values["base_logits"][0], expected.base_logits, tolerance)
        assert ("confidence" in values) == (expected.confidence is not None)
        if expected.confidence is not None:
            assert_close(values["confidence"][0], expected.confidence, tolerance)


def _assert_plain(target: ReferenceTarget, prompt: Sequence[int], output: Sequence[int]) -> None:
    """The output is the target's own: each token its choice after the ones before."""
    logits, _ = target.forward([*prompt, *output], prefill=len(prompt))
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == list(output)

"""The reference against the golden files, against transformers, and against what the layouts imply."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import (
    OMIT,
    write_deepspec,
    write_eagle3,
    write_speculators,
    write_target,
    write_zlab_dflash,
)
from tests.reference import ReferenceDrafter, ReferenceTarget, decode, greedy
from tests.reference.folder import CLASS_DEFAULTS, read_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = np.random.default_rng(5).integers(0, 90, 60).tolist()


def assert_close(actual: NDArray[Any], expected: NDArray[Any], tolerance: float = 1e-4) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def draft(drafter: ReferenceDrafter, target: ReferenceTarget, text: list[int]) -> Any:
    """A draft whose anchor is the last token of the text."""
    return drafter.draft(drafter.taps(target.forward(text)[1])[:-1], text)


# Golden files


@pytest.fixture(scope="module")
def golden_target() -> ReferenceTarget:
    return ReferenceTarget(GOLDEN / "qwen3_target")


@pytest.mark.parametrize("name", ["qwen3_target", "llama_target"])
def test_plain_decoding_is_golden(name: str) -> None:
    target = ReferenceTarget(GOLDEN / name)
    for case in json.loads((GOLDEN / name / "golden.json").read_text())["greedy"]:
        logits, _ = target.forward([*case["prompt"], *case["output"]])  # every step at once, since all before is golden
        assert logits[len(case["prompt"]) - 1 : -1].argmax(axis=-1).tolist() == case["output"]
        assert greedy(target, case["prompt"], 8) == case["output"][:8]


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash", "eagle3"])
def test_speculative_decoding_is_golden(name: str, golden_target: ReferenceTarget) -> None:
    drafter = ReferenceDrafter(GOLDEN / name, golden_target)
    golden = json.loads((GOLDEN / name / "golden.json").read_text())
    for cases, threshold in ((golden["greedy"], None), (golden.get("greedy_threshold_0_6"), 0.6)):
        for case in cases or []:
            result = decode(golden_target, drafter, case["prompt"], 64, threshold)
            rounds = len(result.proposal_lengths)
            assert result.output == case["output"]
            assert result.accepted_draft_lengths == case["accepted_draft_lengths"][:rounds]
            assert result.proposal_lengths == case["proposal_lengths"][:rounds]
            # The golden loop runs once more, for nothing, when a round ends exactly at the limit.
            idle = 1 + sum(result.accepted_draft_lengths) + rounds == 64
            assert len(case["proposal_lengths"]) == rounds + idle


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark"])
def test_blocks_are_golden(name: str, golden_target: ReferenceTarget) -> None:
    drafter = ReferenceDrafter(GOLDEN / name, golden_target)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        for i in range(5):
            prompt = golden[f"{i}.prompt"].tolist()
            logits, states = golden_target.forward(prompt)
            block = drafter.draft(drafter.taps(states), [*prompt, *golden[f"{i}.anchor"].tolist()])
            assert block.tokens == golden[f"{i}.tokens"].tolist()
            assert_close(drafter.taps(states), golden[f"{i}.taps"])
            assert_close(logits, golden[f"{i}.target_logits"])
            assert_close(block.hidden, golden[f"{i}.hidden"])
            assert_close(block.base_logits, golden[f"{i}.base_logits"])
            assert_close(block.logits, golden[f"{i}.logits"])
            assert (block.confidence is None) == (f"{i}.confidence_logits" not in golden)
            if block.confidence is not None:
                assert_close(block.confidence, golden[f"{i}.confidence_logits"])


# Targets against transformers

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-mqa-biases": {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "llama-no-head-dim": {"head_dim": OMIT},
    "llama-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    "llama-linear-old": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama-llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e4, **LLAMA3}},
    "llama-llama3-old": {"rope_theta": 5e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}},
    "llama-yarn-mscale": {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16}},
    "qwen2-yarn-old": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "llama-dynamic": {
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
    "llama-dynamic-grows": {
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "dynamic", "factor": 3.0},
    },
    "mistral": {},
    "mistral-window": {"sliding_window": 9},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen2-window-unused": {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
    "qwen3": {"attention_bias": True},
    "qwen3-window": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize("case", TARGETS)
def test_target_is_transformers(case: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write_target(tmp_path / "target", case.split("-")[0], **TARGETS[case])
    target = ReferenceTarget(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        states = [state[0].numpy() for state in expected.hidden_states]
        logits, own_states = target.forward(TEXT)
        assert_close(logits, expected.logits[0].numpy())
        for own, other in zip(own_states[:-1], states[:-1], strict=True):  # the last one of transformers is normed
            assert_close(own, other)
        # A fresh model: dynamic NTK keeps the longest length it has seen.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        generated = model.generate(
            ids, max_new_tokens=10, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    output = generated.sequences[0, len(TEXT) :].tolist()
    assert greedy(target, TEXT, 10) == output
    steps, _ = target.forward([*TEXT, *output], prefill=len(TEXT))
    assert_close(steps[len(TEXT) - 1 : -1], torch.cat(generated.logits).numpy())


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_class_defaults_are_those_of_transformers(model_type: str) -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model(model_type, use_sliding_window=True)
    for key, value in CLASS_DEFAULTS[model_type].items():
        assert key == "use_sliding_window" or getattr(config, key) == value


def test_dtypes_and_shards_hold_the_same_target(tmp_path: Path) -> None:
    logits = [
        ReferenceTarget(write_target(tmp_path / f"{dtype}-{shards}", "qwen3", dtype=dtype, shards=shards)).forward(
            TEXT
        )[0]
        for dtype, shards in (("float32", 1), ("float32", 3), ("float16", 2), ("bfloat16", 1))
    ]
    assert np.array_equal(logits[0], logits[1])
    assert_close(logits[2], logits[0], 2e-2)
    assert_close(logits[3], logits[0], 2e-1)
    assert not np.array_equal(logits[2], logits[0])


# Drafters


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "qwen3", "qwen3", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> ReferenceTarget:
    return ReferenceTarget(target_folder)


FULL_OR_REDUCED = [None, 60]


def test_every_factory_drafts_losslessly_and_is_sometimes_right(
    tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    folders = [
        *(write_deepspec(tmp_path / head, target_folder, head=head) for head in ("vanilla", "gated", "rnn")),
        write_deepspec(tmp_path / "hidden", target_folder, confidence="hidden", own_embedding=False),
        write_deepspec(tmp_path / "dflash", target_folder, head="none", confidence="none"),
        write_zlab_dflash(tmp_path / "zlab", target_folder),
        *(write_speculators(tmp_path / f"s{size}", target_folder, draft_vocab=size) for size in FULL_OR_REDUCED),
        write_speculators(tmp_path / "sd", target_folder, kind="dflash", sample_from_anchor=OMIT),
        *(write_eagle3(tmp_path / layout, target_folder, layout=layout) for layout in ("deepspec", "speculators")),
        write_eagle3(tmp_path / "legacy", target_folder, layout="legacy", draft_vocab=60),
    ]
    prompts = [TEXT[:3], TEXT[20:32]]
    expected = [greedy(target, prompt, 24) for prompt in prompts]
    for folder in folders:
        drafter = ReferenceDrafter(folder, target, steps=4)
        results = [decode(target, drafter, prompt, 24) for prompt in prompts]
        assert [result.output for result in results] == expected
        proposed = sum(sum(result.proposal_lengths) for result in results)
        assert 0 < sum(sum(result.accepted_draft_lengths) for result in results) < proposed
        if draft(drafter, target, TEXT).confidence is not None:
            cut = [decode(target, drafter, prompt, 24, threshold=0.6) for prompt in prompts]
            assert [result.output for result in cut] == expected
            assert {len(set(result.proposal_lengths)) > 1 for result in cut} == {True}


def test_a_stop_token_ends_a_request_inside_a_block(
    tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    drafter = ReferenceDrafter(write_deepspec(tmp_path / "d", target_folder, head="vanilla"), target)
    whole = decode(target, drafter, TEXT[:3], 24)
    inside = whole.accepted_draft_lengths.index(max(whole.accepted_draft_lengths))
    first = 1 + sum(whole.accepted_draft_lengths[:inside]) + inside  # index of that round's first token
    stop = whole.output[first]
    result = decode(target, drafter, TEXT[:3], 24, stop=[stop])
    assert result.output == whole.output[: whole.output.index(stop) + 1] == greedy(target, TEXT[:3], 24, stop=[stop])
    assert result.accepted_draft_lengths == [*whole.accepted_draft_lengths[:inside], 1]


def test_zlab_is_deepspec_without_slot_0(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    zlab = ReferenceDrafter(write_zlab_dflash(tmp_path / "z", target_folder), target)
    deepspec = ReferenceDrafter(
        write_deepspec(tmp_path / "d", target_folder, head="none", confidence="none", own_embedding=False), target
    )
    block, whole = draft(zlab, target, TEXT), draft(deepspec, target, TEXT)
    assert block.tokens == whole.tokens[1:]
    assert np.array_equal(block.hidden, whole.hidden[1:])
    nested = write_zlab_dflash(tmp_path / "n", target_folder, block_size=OMIT, dflash={"block_size": 5})
    assert draft(ReferenceDrafter(nested, target), target, TEXT).tokens == block.tokens


def test_nested_and_prefixed_spellings(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    changes: dict[str, Any] = {"target_layer_ids": OMIT, "mask_token_id": OMIT, "dspark_mask_token_id": 95}
    nested = {"target_layer_ids": [0, 1, 2]}
    folder = write_deepspec(tmp_path / "n", target_folder, dspark_config=nested, **changes)
    plain = ReferenceDrafter(write_deepspec(tmp_path / "p", target_folder), target)
    logits = draft(ReferenceDrafter(folder, target), target, TEXT).logits
    assert np.array_equal(logits, draft(plain, target, TEXT).logits)


def test_missing_zlab_taps_are_spread(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    spread = [
        ReferenceDrafter(
            write_zlab_dflash(tmp_path / str(n), target_folder, taps=None, layers=n), target
        ).layout.tap_ids
        for n in (1, 2, 3)
    ]
    assert spread == [[3], [1, 3], [1, 2, 3]]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_reduced_vocabulary_cuts_rows(
    head: str, tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    folder = write_speculators(tmp_path / "r", target_folder, draft_vocab=60, head=head)
    tensors = read_tensors(folder)
    rows = np.flatnonzero(tensors["t2d"])
    assert rows.tolist() == (np.arange(60) + tensors["d2t"]).tolist()
    reduced = draft(ReferenceDrafter(folder, target), target, TEXT)
    assert reduced.tokens == rows[reduced.logits.argmax(axis=-1)].tolist()
    assert_close(reduced.base_logits, reduced.hidden @ target.head[rows].T, 1e-12)


def test_layer_config_is_a_difference_from_its_class(
    tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    changes = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32}
    folder = write_speculators(tmp_path / "s", target_folder, backbone_changes=changes)
    written = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert not set(changes) & set(written)
    assert len(draft(ReferenceDrafter(folder, target), target, TEXT).tokens) == 5


def test_partial_rotation_leaves_the_rest_of_a_head(
    tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": rope | {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
    ]
    drafters = [
        ReferenceDrafter(write_deepspec(tmp_path / str(i), target_folder, **spelling), target)
        for i, spelling in enumerate([*spellings, {}])
    ]
    rows = np.random.default_rng(0).standard_normal((3, 2, 16))
    turned = drafters[0].rope.rotate(rows, np.arange(3), np.arange(3))
    assert np.array_equal(turned[..., 8:], rows[..., 8:])
    assert_close(turned[1, 0, 0], rows[1, 0, 0] * np.cos(1) - rows[1, 0, 4] * np.sin(1), 1e-12)
    hidden = [draft(drafter, target, TEXT).hidden for drafter in drafters]
    assert np.array_equal(hidden[0], hidden[1])
    assert not np.allclose(hidden[0], hidden[2])


WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
MASKS: dict[str, tuple[bool, Any]] = {  # name: causal, how the file says it
    "zlab": (True, lambda folder, target: write_zlab_dflash(folder, target, layers=1, **WINDOW)),
    "zlab-dflash-causal-false": (
        False,
        lambda folder, target: write_zlab_dflash(folder, target, layers=1, dflash={"causal": False}, **WINDOW),
    ),
    "zlab-is-causal-false": (
        False,
        lambda folder, target: write_zlab_dflash(folder, target, layers=1, is_causal=False, **WINDOW),
    ),
    "speculators": (True, lambda folder, target: write_speculators(folder, target, layers=1, backbone_changes=WINDOW)),
    "speculators-non-causal": (
        False,
        lambda folder, target: write_speculators(
            folder, target, layers=1, backbone_changes=WINDOW, sliding_window_non_causal=True
        ),
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_windows_of_drafters(case: str, tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    causal, write = MASKS[case]
    drafter = ReferenceDrafter(write(tmp_path / "d", target_folder), target)
    taps = drafter.taps(target.forward(TEXT)[1])[:-1]
    first = 0 if drafter.layout.anchor_predicts else 1

    def changed(position: int) -> list[bool]:
        """Which slots notice another context at a position."""
        other = taps.copy()
        other[position] += 1
        return [not np.array_equal(*pair) for pair in zip(block, drafter.draft(other, TEXT).hidden, strict=True)]

    block = drafter.draft(taps, TEXT).hidden
    for back in (1, 3, 5, 6):  # slot k sees the context at start − back if it is less than 6 tokens away
        assert changed(len(taps) - back) == [slot + back < 6 for slot in range(first, 5)]
    drafter.layout.block_size = 3  # later slots are visible only without causality
    same = np.allclose(drafter.draft(taps, TEXT).hidden, block[: 3 - first])
    assert same == causal


def test_rnn_head_remembers_the_previous_token(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    drafter = ReferenceDrafter(write_deepspec(tmp_path / "d", target_folder, head="rnn", rank=4), target)
    tensors, eye = drafter.tensors, np.eye(4)
    joint = np.zeros((12, 8 + 32))
    joint[4:8, 4:8] = eye  # the candidate reads the embedding, the output reads the state
    joint[8:12, 0:4] = 3 * eye
    tensors["markov_head.joint_proj.weight"] = joint
    tensors["markov_head.joint_proj.bias"] = np.repeat([-50.0, 0.0, 0.0], 4)  # a closed gate forgets the old state
    block = draft(drafter, target, TEXT)
    embedded = tensors["markov_head.markov_w1.weight"][[TEXT[-1], *block.tokens]]
    states = np.concatenate([np.zeros((1, 4)), np.tanh(embedded[:4])])
    bias = np.tanh(3 * states) @ tensors["markov_head.markov_w2.weight"].T
    assert_close(block.logits, block.base_logits + bias, 1e-12)
    assert block.tokens == block.logits.argmax(axis=-1).tolist()


def test_eagle3_layouts_agree(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    folders = {name: write_eagle3(tmp_path / name, target_folder, layout=name) for name in ("speculators", "legacy")}
    drafters = {name: ReferenceDrafter(folder, target, steps=4) for name, folder in folders.items()}
    own = drafters["legacy"].embedding
    assert not np.allclose(own, target.embedding)
    drafters["legacy"].embedding = target.embedding
    assert drafters["legacy"].layout.tap_ids == drafters["speculators"].layout.tap_ids == [0, 1, 2]
    one, other = (draft(drafter, target, TEXT) for drafter in drafters.values())
    assert one.tokens == other.tokens
    assert np.array_equal(one.logits, other.logits)
    default = write_eagle3(tmp_path / "default", target_folder, layout="legacy", taps=[1, 2])
    assert "eagle_config" in json.loads((default / "config.json").read_text())
    eight = ReferenceTarget(write_target(tmp_path / "eight", num_hidden_layers=8))
    default = write_eagle3(tmp_path / "unnamed", tmp_path / "eight", layout="legacy", taps=[1, 3, 4])
    assert "eagle_config" not in json.loads((default / "config.json").read_text())
    assert ReferenceDrafter(default, eight, steps=4).layout.tap_ids == [1, 3, 4]


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", None])
def test_eagle3_is_a_llama_layer(
    flag: str | None, tmp_path: Path, target_folder: Path, target: ReferenceTarget
) -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    flags: dict[str, Any] = {flag: True} if flag else {}
    folder = write_eagle3(tmp_path / "d", target_folder, **flags)
    drafter = ReferenceDrafter(folder, target)
    weights = {name: torch.tensor(tensor) for name, tensor in drafter.tensors.items()}
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = llama.LlamaConfig(**{key: drafter.backbone[key] for key in keys}, attn_implementation="eager")
    layer = llama.LlamaDecoderLayer(config, 0).double()
    for which in "qkv":
        name = f"{which}_proj"
        rows = len(weights[f"layers.0.self_attn.{name}.weight"])
        setattr(layer.self_attn, name, torch.nn.Linear(64, rows, bias=False).double())
    prefix = "layers.0."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    layer.load_state_dict({name: tensor for name, tensor in own.items() if name != "hidden_norm.weight"})

    def norm(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)

    taps = torch.tensor(drafter.taps(target.forward(TEXT)[1])[:-1])
    if flag == "norm_before_fc":
        taps = norm(taps, weights["input_norm.weight"])
    if flag == "fc_norm":
        taps = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(taps.split(32, -1))], -1)
    features = taps @ weights["fc.weight"].T
    hidden = norm(features, own["hidden_norm.weight"])
    embedded = layer.input_layernorm(torch.tensor(target.embedding[TEXT[1:]]))
    count = len(features)
    with torch.no_grad():
        turned = llama.LlamaRotaryEmbedding(config)(features, torch.arange(count)[None])
        future = torch.full((count, count), -torch.inf, dtype=torch.double).triu(1)
        joint = torch.cat([embedded, hidden], -1)[None]
        x = layer.self_attn(hidden_states=joint, position_embeddings=turned, attention_mask=future[None, None])[0]
        x = x + (hidden if flag == "norm_before_residual" else features)
        x = (x + layer.mlp(layer.post_attention_layernorm(x)))[0]
    block = draft(drafter, target, TEXT)
    assert_close(block.hidden[0], x[-1].numpy(), 1e-5)
    assert_close(block.logits[0], norm(x[-1], weights["norm.weight"]).numpy() @ target.head.T, 1e-5)
    assert not np.allclose(block.hidden[1], block.hidden[0])


def test_text_after_the_anchor_is_refused(tmp_path: Path, target_folder: Path, target: ReferenceTarget) -> None:
    drafter = ReferenceDrafter(write_zlab_dflash(tmp_path / "d", target_folder), target)
    with pytest.raises(ValueError, match="60 taps do not belong to 60 tokens"):
        drafter.draft(drafter.taps(target.forward(TEXT)[1]), TEXT)

"""Reduced draft vocabularies and top-k heads: the same logits, fewer of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.exporter.checkpoints import read_drafter, read_target
from dspark.exporter.draft_vocabulary import cut_vocabulary, frequent_tokens
from dspark.exporter.errors import ExportError
from dspark.exporter.export import export_bundle, prepare
from dspark.exporter.exported_graphs import ExportedGraphs
from dspark.runtime import Bundle, DSparkInference, SamplingParams, SpeculationOptions
from tests.checkpoints import write_deepspec, write_eagle3, write_target

TEXT = np.array([5, 12, 19, 26, 33, 40, 50, 57, 64, 3, 10, 17])
ANCHOR = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", eos_token_id=[94, 2])


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens 40 … 49 often, 60 … 69 sometimes, 70 … 79 only in prompts."""
    file = tmp_path_factory.mktemp("data") / "data.npz"
    ids = np.array([[*range(40, 50)] * 2 + [*range(60, 70)], [*range(70, 80)] * 3], np.uint16)
    np.savez(file, ids=ids, response_mask=np.array([[1] * 30, [0] * 30], np.uint8))
    return file


def test_the_most_frequent_tokens_are_kept(target: Path, counts: Path) -> None:
    described = read_target(target)
    assert frequent_tokens(12, described, counts).tolist() == [2, *range(40, 50), 94]
    assert frequent_tokens(24, described, counts).tolist() == [0, 1, 2, *range(40, 50), *range(60, 70), 94]
    assert frequent_tokens(6, described, None).tolist() == [0, 1, 2, 3, 4, 94]
    assert frequent_tokens(96, described, None).tolist() == [*range(96)]


@pytest.mark.parametrize("count", [2, 97])
def test_sizes_that_cannot_be(count: int, target: Path) -> None:
    with pytest.raises(ExportError, match=f"has from 3 to 96 tokens, not {count}"):
        frequent_tokens(count, read_target(target), None)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": [1]}, "no .npz file with the array ids"),
        ({"ids": [1.5]}, "ids must be whole numbers from 0 to 95"),
        ({"ids": [96]}, "ids must be whole numbers from 0 to 95"),
        ({"ids": [1, 2], "response_mask": [1]}, "no .npz file with the array ids"),
    ],
)
def test_files_that_are_no_token_files(
    arrays: dict[str, list[float]], message: str, target: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", **{name: np.array(values) for name, values in arrays.items()})
    with pytest.raises(ExportError, match=message):
        frequent_tokens(10, read_target(target), tmp_path / "data.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ExportError, match=r"text\.npz: no \.npz file"):
        frequent_tokens(10, read_target(target), tmp_path / "text.npz")


@given(st.sets(st.integers(0, 95), min_size=1, max_size=95), st.data())
def test_rows_are_read_in_any_pieces(target: Path, chosen: set[int], data: st.DataObject) -> None:
    tokens = np.array(sorted(chosen))
    described = read_target(target)
    folder = target.parent / "drafter"
    drafter = read_drafter(folder if folder.exists() else write_deepspec(folder, target), described)
    cut = cut_vocabulary(drafter, described, tokens)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        source = {**described.tables, **drafter.tensors}[name].load()
        start = data.draw(st.integers(0, len(tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(tokens)))
        assert np.array_equal(cut.tensors[name].rows(start, stop), source[tokens[start:stop]])


def block_and_head(bundle: Path) -> dict[str, np.ndarray]:
    graphs = ExportedGraphs(Bundle.open(bundle))
    context = graphs.target(TEXT)
    context.pop("logits")
    block = graphs.block(context, ANCHOR)
    return block | graphs.head(block, ANCHOR)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_small_vocabulary_has_the_logits_of_its_tokens(head: str, target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, head=head)
    whole = block_and_head(export(target, drafter, tmp_path / "whole"))
    kept = frequent_tokens(60, read_target(target), None)
    small = block_and_head(export(target, drafter, tmp_path / "small", draft_vocabulary=60))
    assert np.allclose(small["base_logits"], whole["base_logits"][..., kept], atol=1e-5)
    # The first slot's repair depends on the anchor alone; later ones on what was drawn before.
    assert np.allclose(small["draft_logits"][:, 0], whole["draft_logits"][:, 0, kept], atol=1e-5)
    assert np.isin(small["tokens"], kept).all()


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("vocabulary", [None, 60])
def test_top_k_has_the_logits_of_the_likeliest(head: str, vocabulary: int | None, target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, head=head)
    whole = block_and_head(export(target, drafter, tmp_path / "whole", draft_vocabulary=vocabulary))
    few = block_and_head(export(target, drafter, tmp_path / "few", draft_vocabulary=vocabulary, draft_top_k=8))
    assert np.array_equal(few["base_logits"], -np.sort(-whole["base_logits"], axis=-1)[..., :8])
    kept = frequent_tokens(vocabulary or 96, read_target(target), None)
    assert np.array_equal(few["draft_ids"], kept[few["candidates"]])
    expected = np.take_along_axis(whole["draft_logits"][:, 0], few["candidates"][:, 0], axis=-1)
    assert np.allclose(few["draft_logits"][:, 0], expected, atol=1e-5)
    chosen = np.take_along_axis(few["draft_ids"], few["draft_logits"].argmax(axis=-1)[..., None], axis=-1)[..., 0]
    assert np.array_equal(few["tokens"], chosen)


def test_output_stays_the_targets(target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target)
    bundle = export(target, drafter, tmp_path / "bundle", draft_vocabulary=60, draft_top_k=8)
    texts, params = [TEXT[:n].tolist() for n in (2, 5, 12)], SamplingParams(max_new_tokens=20)
    plain, drafted = (
        DSparkInference.load(bundle, threads=1, options=SpeculationOptions(name)).generate(texts, params)
        for name in ("off", "fixed")
    )
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert sum(sum(done.stats.accepted_lengths) for done in drafted) > 3


def test_what_does_not_go_together_is_refused(target: Path, counts: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    drafter = write_deepspec(tmp_path / "drafter", target)
    small = write_eagle3(tmp_path / "eagle3", target, draft_vocab=60)
    for arguments, message in [
        ({"draft_vocabulary": 60}, "--draft-vocabulary needs a drafter"),
        ({"drafter": drafter, "draft_vocabulary_from": counts}, "--draft-vocabulary-from needs --draft-vocabulary"),
        ({"drafter": small, "draft_vocabulary": 50}, "already drafts from 60 tokens only"),
        ({"drafter": small, "draft_top_k": 8}, "--draft-top-k needs a DSpark or DFlash drafter"),
        ({"draft_top_k": 8}, "--draft-top-k needs a DSpark or DFlash drafter"),
        ({"drafter": drafter, "draft_top_k": 0}, "--draft-top-k is 0; drafter drafts from 1 to 96 tokens"),
        ({"drafter": drafter, "draft_vocabulary": 50, "draft_top_k": 51}, "drafts from 1 to 50 tokens"),
    ]:
        with pytest.raises(ExportError, match=message):
            prepare(target, arguments.pop("drafter", None), output, **arguments)
    assert not output.exists()


def export(target: Path, drafter: Path, output: Path, **options: int | None) -> Path:
    export_bundle(prepare(target, drafter, output, **options))
    return output

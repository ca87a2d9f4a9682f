"""Trains a drafter for a target: DSpark, DFlash or EAGLE-3.

The drafter learns the target's whole distribution over its own conversations (``generate_data.py``): first by
cross-entropy alone, which pulls from anywhere, then by the paper's losses, which count what acceptance counts. The
learning rate falls to zero over the time given, so that any budget ends with a finished drafter. Broken off, the same
command goes on from its last checkpoint. Conversations that were kept apart (``--confidence-data``) make the confidence
head honest at the end.

The output is a checkpoint in DeepSpec's layout, without embedding and LM head: ``dspark-export --drafter`` reads it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from checkpoint import load_checkpoint, read_config
from config import DraftConfig, HeadKind, spread_taps
from conversations import Conversations
from drafters import make_drafter
from features import FeatureStore
from losses import LossVocabulary
from rich.console import Console
from start import start_from_target
from trainer import Settings, Trainer

from dspark.exporter.checkpoints import read_target
from dspark.exporter.checkpoints.description import DrafterKind
from dspark.exporter.torch_reference import load_target_model
from dspark.runtime import DSparkError
from dspark.runtime.bundle.hashing import hash_file

BIGRAM_TOKENS = 8192
"""Tokens of which bigrams are counted for the Markov head's start."""

console = Console(highlight=False, markup=False)


class Precision(StrEnum):
    """Of the matrix products."""

    FP32 = "fp32"
    BF16 = "bf16"


def main(
    target: Annotated[Path, typer.Option(help="The target: a Hugging Face folder or a .gguf file.")],
    data: Annotated[list[Path], typer.Option(help="Conversations; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter, its log and what a resumed run needs.")],
    kind: Annotated[DrafterKind, typer.Option(help="What to train.")] = DrafterKind.DSPARK,
    minutes: Annotated[float, typer.Option(help="Time of training.")] = 60.0,
    layers: Annotated[int | None, typer.Option(help="Draft layers.", show_default="2, EAGLE-3: 1")] = None,
    block_size: Annotated[int, typer.Option(help="Draft tokens.")] = 7,
    taps: Annotated[str | None, typer.Option(help="Layer outputs, as 1,8,14,21,27.", show_default="five")] = None,
    mask_token: Annotated[int | None, typer.Option(help="Fills slots.", show_default="a token the data lacks")] = None,
    head: Annotated[HeadKind, typer.Option(help="DSpark's sequential head.")] = HeadKind.VANILLA,
    markov_rank: Annotated[int, typer.Option(help="Its rank.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Its highest.")] = 2e-3,
    cross_entropy_first: Annotated[float, typer.Option(help="Share of the time before the paper's losses.")] = 0.5,
    loss_vocabulary: Annotated[int, typer.Option(help="Frequent tokens the loss looks at; 0: all.")] = 4096,
    loss_samples: Annotated[int, typer.Option(help="Other tokens, drawn for each step.")] = 1024,
    rows: Annotated[int, typer.Option(help="Conversations a pass.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Passes a step.")] = 1,
    anchors: Annotated[int, typer.Option(help="Drafts a conversation and pass.")] = 48,
    held_out: Annotated[int, typer.Option(help="Conversations for evaluation: the first ones.")] = 128,
    evaluate_every: Annotated[float, typer.Option(help="Minutes between evaluations.")] = 3.0,
    start_from: Annotated[
        Path | None, typer.Option(help="A drafter of this shape to train on, or with fewer layers.")
    ] = None,
    confidence_data: Annotated[
        list[Path] | None, typer.Option(help="Other conversations; at the end the confidence head is fitted to them.")
    ] = None,
    features: Annotated[Path | None, typer.Option(help="Keeps the target's.", show_default="in the output")] = None,
    precision: Annotated[Precision | None, typer.Option(help="Of products.", show_default="bf16 if fast here")] = None,
    threads: Annotated[int | None, typer.Option(help="Host threads.", show_default="one a core")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Fuse layers; needs a C++ compiler.")] = False,
    seed: Annotated[int, typer.Option(help="Makes the run repeatable.")] = 0,
) -> None:
    """Trains a drafter on conversations of its target."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = precision is Precision.BF16 or (precision is None and has_fast_bf16(device))
    settings = Settings(
        *(minutes, learning_rate, cross_entropy_first, rows, accumulate, anchors, evaluate_every, seed, bf16, compiled)
    )
    if loss_vocabulary and loss_samples < 1:
        raise ValueError(f"loss_samples is {loss_samples}; beside a part of the vocabulary it must be at least 1")
    description = read_target(target)
    backbone, vocabulary_size = description.backbone, description.vocabulary_size
    conversations = Conversations.read(data)
    if not 0 < held_out < len(conversations):
        raise ValueError(f"held_out is {held_out}; of {len(conversations)} conversations some must remain to train on")
    largest = int(conversations.ids.max())
    if largest >= vocabulary_size:
        raise ValueError(f"the data has token {largest}; the target's vocabulary ends at {vocabulary_size - 1}")
    output.mkdir(parents=True, exist_ok=True)
    training = conversations.take(slice(held_out, None))
    model = load_target_model(target, description, torch.bfloat16 if bf16 else torch.float32).to(device)
    config = DraftConfig(
        kind=kind,
        target_layers=len(backbone.layers),
        hidden_size=backbone.hidden_size,
        intermediate_size=backbone.intermediate_size,
        attention_heads=backbone.head_count,
        kv_heads=backbone.kv_head_count,
        head_dim=backbone.head_dim,
        norm_epsilon=backbone.norm_epsilon,
        rope_theta=float(model.config.rope_parameters["rope_theta"]),
        context_length=description.context_length,
        vocabulary_size=vocabulary_size,
        stop_token_id=next(iter(description.stop_token_ids), None),
        layers=layers or (1 if kind is DrafterKind.EAGLE3 else 2),
        block_size=block_size,
        taps=spread_taps(len(backbone.layers)) if taps is None else parse_taps(taps),
        mask_token_id=choose_mask_token(conversations, vocabulary_size, [output, start_from])
        if mask_token is None
        else mask_token,
        head=head,
        markov_rank=markov_rank if kind is DrafterKind.DSPARK else 0,
    )
    drafter = make_drafter(config, model.get_input_embeddings().weight)
    start_from_target(drafter, model, range(config.target_layers - config.layers, config.target_layers))
    if start_from is not None:
        load_checkpoint(drafter, start_from)
    elif drafter.markov_head is not None:
        drafter.markov_head.start_from_bigrams(training.ids, training.responses, BIGRAM_TOKENS)
    if compiled:
        for layer in [*model.model.layers, *drafter.layers]:
            layer.compile()
    fingerprint = f"{[hash_file(path) for path in description.files]} {bf16}"
    folder = features or output / "features"
    store = FeatureStore(folder, conversations, config.taps, model, fingerprint)
    parameters = sum(value.numel() for value in drafter.parameters())
    console.print(
        f"{kind}: {parameters / 1e6:.1f} million parameters, {len(conversations)} conversations with "
        f"{conversations.response_tokens / 1e6:.2f} million response tokens, {held_out} conversations held out."
    )
    (output / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    vocabulary = LossVocabulary(training.token_counts(vocabulary_size), loss_vocabulary, loss_samples)
    lm_head = model.get_output_embeddings().weight
    trainer = Trainer(drafter.to(device), lm_head, store, held_out, vocabulary, settings, output, console)
    trainer.run()
    if confidence_data:
        trainer.fit_confidence(
            FeatureStore(folder, Conversations.read(confidence_data), config.taps, model, fingerprint)
        )


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is computed by hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def parse_taps(text: str) -> tuple[int, ...]:
    """Layer outputs as given on the command line."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"taps are {text!r}; they must be numbers with commas between, as 1,8,14") from error


def choose_mask_token(conversations: Conversations, vocabulary_size: int, folders: Sequence[Path | None]) -> int:
    """The mask token of the first folder with a drafter that has one; else the first token that no conversation has."""
    for folder in folders:
        if folder is not None and (folder / "config.json").exists():
            token = read_config(folder).get("mask_token_id")
            if isinstance(token, int):
                return token
    counts = torch.bincount(conversations.ids.flatten(), minlength=vocabulary_size)
    unused = (counts == 0).nonzero()
    if not len(unused):
        raise ValueError("every token occurs in the data; give --mask-token")
    return int(unused[0])


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ArithmeticError, DSparkError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error

"""Trains a drafter for a target: DSpark, DFlash or EAGLE-3.

The drafter learns the target's whole distribution over its own conversations (``generate_data.py``): first by
cross-entropy alone, which pulls from anywhere, then by the paper's losses, which count what acceptance counts. The
learning rate falls to zero over the time given, so that any budget ends with a finished drafter. Broken off, the same
command goes on from its last checkpoint.

The output is a checkpoint in DeepSpec's layout, without embedding and LM head: ``dspark-export --drafter`` reads it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import losses
import torch
import typer
from config import DraftConfig, HeadKind, Kind, spread_taps
from conversations import Conversations, sample_anchors
from drafters import BlockDrafter, Eagle3Drafter, make_drafter
from features import FeatureStore
from losses import WHOLE_VOCABULARY, Losses, LossVocabulary, LossWeights, Vocabulary, compute_losses
from rich.console import Console
from safetensors.torch import load_file, save_file
from start import start_from_target
from torch import Tensor, nn

from dspark.exporter.checkpoints import read_target
from dspark.exporter.errors import ExportError
from dspark.exporter.torch_reference import load_target_model

BIGRAM_TOKENS = 8192
"""Tokens of which bigrams are counted for the Markov head's start."""
WARM_UP = 0.03
"""Share of the time in which the learning rate rises."""

console = Console(highlight=False, markup=False)


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        minutes: Time of training, without the target's features and evaluation.
        learning_rate: Its highest.
        cross_entropy_first: Share of the time that is trained by cross-entropy alone.
        rows: Conversations a pass.
        accumulate: Passes a step.
        anchors: Drafts a conversation.
        evaluate_every: Minutes between evaluations.
        seed: Makes the run repeatable.
        bf16: Whether matrix products are computed in bfloat16.
    """

    minutes: float
    learning_rate: float
    cross_entropy_first: float
    rows: int
    accumulate: int
    anchors: int
    evaluate_every: float
    seed: int
    bf16: bool


class Trainer:
    """One training run.

    Args:
        drafter: What learns.
        lm_head: The target's LM head, ``[V, H]``.
        store: Conversations with their features.
        held_out: So many of the first ones are for evaluation.
        vocabulary: Chooses the tokens that losses are taken over.
        settings: How to train.
        output: Receives checkpoints and the log.
    """

    def __init__(
        self,
        drafter: BlockDrafter | Eagle3Drafter,
        lm_head: Tensor,
        store: FeatureStore,
        held_out: int,
        vocabulary: LossVocabulary,
        settings: Settings,
        output: Path,
    ) -> None:
        self._drafter = drafter
        self._lm_head = lm_head
        self._store = store
        self._held_out = held_out
        self._vocabulary = vocabulary
        self._settings = settings
        self._output = output
        self._optimizers = make_optimizers(drafter, settings.learning_rate)
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._step = 0
        self._seconds = 0.0

    def run(self) -> None:
        """Trains until the time is over; evaluates and saves in between and at the end."""
        self._resume()
        settings, budget = self._settings, 60 * self._settings.minutes
        due = self._seconds + (0 if self._step == 0 else 60 * settings.evaluate_every)
        batches, loss, since = self._batches(), 0.0, self._step
        while True:
            if self._seconds >= min(due, budget):
                self._report(loss / max(1, self._step - since))
                self._save()
                due, loss, since = due + 60 * settings.evaluate_every, 0.0, self._step
            if self._seconds >= budget:
                break
            start = perf_counter()
            loss += self._train(next(batches), self._seconds / budget)
            self._seconds += perf_counter() - start
            self._step += 1

    def _batches(self) -> Iterator[list[list[int]]]:
        """For each step the passes' conversations; every conversation once before any comes again."""
        settings, count = self._settings, len(self._store.conversations) - self._held_out
        order: list[int] = []
        while True:
            passes = []
            for _ in range(settings.accumulate):
                if len(order) < settings.rows:
                    order = (torch.randperm(count, generator=self._generator) + self._held_out).tolist()
                passes.append([order.pop() for _ in range(min(settings.rows, count))])
            yield passes

    def _train(self, passes: list[list[int]], progress: float) -> float:
        """One step of the optimisers; returns the loss."""
        settings = self._settings
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(progress)
        weights = LossWeights()
        if progress < settings.cross_entropy_first:
            weights = LossWeights(cross_entropy=1.0, distance=0.0)
        total = 0.0
        for indices in passes:
            vocabulary = self._vocabulary.draw(self._generator)
            losses, _ = self._losses(indices, settings.anchors, vocabulary, weights, self._generator)
            (losses.total / len(passes)).backward()
            total += float(losses.total.detach()) / len(passes)
        nn.utils.clip_grad_norm_(self._drafter.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _losses(
        self,
        indices: list[int],
        anchors: int,
        vocabulary: Vocabulary,
        weights: LossWeights,
        generator: torch.Generator,
    ) -> tuple[Losses, Tensor]:
        """Losses of some conversations, and which slots are valid."""
        device = self._lm_head.device
        rows = self._store.rows(indices)
        places, valid = sample_anchors(rows.responses, anchors, self._drafter.config.block_size, generator)
        rows, places, valid = rows.to(device, self._lm_head.dtype), places.to(device), valid.to(device)
        head = getattr(self._drafter, "markov_head", None)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._settings.bf16):
            drafted = self._drafter(rows, places)
            losses = compute_losses(
                drafted,
                rows,
                places,
                valid,
                self._lm_head,
                None if head is None else head.markov_w2,
                vocabulary.to(device),
                weights,
            )
        return losses, valid

    @torch.no_grad()
    def _report(self, loss: float) -> None:
        """Evaluates on the conversations held out, over the whole vocabulary; prints a line and logs it."""
        generator = torch.Generator().manual_seed(0)  # the same anchors every time
        anchors = 16
        sums = {name: torch.zeros(self._drafter.config.block_size) for name in ("acceptance", "agreement", "count")}
        lengths = dict.fromkeys(("acceptance", "agreement"), 0.0)
        drafts, confidence_bias = 0, 0.0
        for at in range(0, self._held_out, self._settings.rows):
            indices = list(range(at, min(at + self._settings.rows, self._held_out)))
            losses, valid = self._losses(indices, anchors, WHOLE_VOCABULARY, LossWeights(), generator)
            whole = valid[..., -1].cpu()  # blocks that end inside the response
            for name in lengths:
                value = getattr(losses, name).cpu()
                sums[name] += value[whole].sum(dim=0)
                lengths[name] += float(value[whole].cumprod(dim=-1).sum())
            drafts += int(whole.sum())
            confidence_bias += float(losses.confidence_bias.cpu()[whole].sum())
        size = self._drafter.config.block_size
        figures = {
            "minutes": round(self._seconds / 60, 2),
            "step": self._step,
            "loss": round(loss, 4),
            "acceptance_length": round(1 + lengths["acceptance"] / drafts, 4),
            "greedy_acceptance_length": round(1 + lengths["agreement"] / drafts, 4),
            "acceptance": [round(value, 4) for value in (sums["acceptance"] / drafts).tolist()],
            "confidence_bias": round(confidence_bias / drafts / size, 4),
        }
        with (self._output / "log.jsonl").open("a") as log:
            log.write(json.dumps(figures) + "\n")
        console.print(
            f"{figures['minutes']:7.1f} min  step {self._step:6d}  loss {loss:.3f}  held-out acceptance length "
            f"{figures['acceptance_length']:.3f} (greedy {figures['greedy_acceptance_length']:.3f}), by position "
            + " ".join(f"{value:.2f}" for value in figures["acceptance"])
            + f"  confidence {figures['confidence_bias']:+.3f}"
        )

    def _save(self) -> None:
        save_checkpoint(self._drafter, self._output)
        state = {
            "drafter": self._drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "generator": self._generator.get_state(),
            "step": self._step,
            "seconds": self._seconds,
        }
        partial = self._output / "state.partial"
        torch.save(state, partial)
        partial.rename(self._output / "state.pt")

    def _resume(self) -> None:
        path = self._output / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True, map_location=self._lm_head.device)
        self._drafter.load_state_dict(state["drafter"])
        for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self._generator.set_state(state["generator"].cpu())
        self._step, self._seconds = state["step"], state["seconds"]
        console.print(f"Going on after {self._seconds / 60:.1f} minutes, step {self._step}.")


def schedule(progress: float) -> float:
    """Factor on the learning rate: a short rise, then a fall to zero that is slow at both ends."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    return float(0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * (progress - WARM_UP) / (1 - WARM_UP))))


def make_optimizers(drafter: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, which learn in half the steps with it; AdamW for all else."""
    matrices, others = [], []
    for name, parameter in drafter.named_parameters():
        inner = parameter.ndim == 2 and not name.startswith(("markov_head.markov_", "confidence_head."))
        (matrices if inner else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def save_checkpoint(drafter: BlockDrafter | Eagle3Drafter, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in bfloat16."""
    tensors = {name: value.detach().cpu().bfloat16().contiguous() for name, value in drafter.state_dict().items()}
    partial = folder / "model.partial"
    save_file(tensors, partial)
    (folder / "config.json").write_text(json.dumps(drafter.config.as_json(), indent=2) + "\n")
    partial.rename(folder / "model.safetensors")


def load_checkpoint(drafter: nn.Module, folder: Path) -> None:
    """Takes the weights of a checkpoint that ``save_checkpoint`` wrote."""
    tensors = load_file(folder / "model.safetensors")
    expected = {name: value.shape for name, value in drafter.state_dict().items()}
    found = {name: value.shape for name, value in tensors.items()}
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()))[0]
        raise ValueError(f"{folder} is a drafter of another shape: {odd[0]} {list(odd[1])} is not in both")
    drafter.load_state_dict(tensors)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is computed by hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def main(
    target: Annotated[Path, typer.Option(help="The target: a Hugging Face folder or a .gguf file.")],
    data: Annotated[list[Path], typer.Option(help="Conversations; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter, its log and what a resumed run needs.")],
    kind: Annotated[Kind, typer.Option(help="What to train.")] = Kind.DSPARK,
    minutes: Annotated[float, typer.Option(help="Time of training.")] = 60.0,
    layers: Annotated[int | None, typer.Option(help="Draft layers.", show_default="2, EAGLE-3: 1")] = None,
    block_size: Annotated[int, typer.Option(help="Draft tokens.")] = 7,
    taps: Annotated[str | None, typer.Option(help="Layer outputs, as 1,8,14,21,27.", show_default="five")] = None,
    mask_token: Annotated[int | None, typer.Option(help="Fills slots.", show_default="a token the data lacks")] = None,
    head: Annotated[HeadKind, typer.Option(help="DSpark's sequential head.")] = HeadKind.VANILLA,
    markov_rank: Annotated[int, typer.Option(help="Its rank.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Its highest.")] = 1e-3,
    cross_entropy_first: Annotated[float, typer.Option(help="Share of the time before the paper's losses.")] = 0.4,
    loss_vocabulary: Annotated[int, typer.Option(help="Frequent tokens the loss looks at; 0: all.")] = 6144,
    loss_samples: Annotated[int, typer.Option(help="Other tokens, drawn for each step.")] = 2048,
    rows: Annotated[int, typer.Option(help="Conversations a pass.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Passes a step.")] = 1,
    anchors: Annotated[int, typer.Option(help="Drafts a conversation and pass.")] = 48,
    held_out: Annotated[int, typer.Option(help="Conversations for evaluation: the first ones.")] = 128,
    evaluate_every: Annotated[float, typer.Option(help="Minutes between evaluations.")] = 3.0,
    start_from: Annotated[Path | None, typer.Option(help="A drafter of this shape to train on.")] = None,
    features: Annotated[Path | None, typer.Option(help="Keeps the target's.", show_default="in the output")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.", show_default="bf16 if fast here")] = None,
    threads: Annotated[int | None, typer.Option(help="Host threads.", show_default="one a core")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Fuse layers; needs a C++ compiler.")] = False,
    seed: Annotated[int, typer.Option(help="Makes the run repeatable.")] = 0,
) -> None:
    """Trains a drafter on conversations of its target."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = has_fast_bf16(device) if precision is None else precision == "bf16"
    description = read_target(target)
    conversations = Conversations.read(data)
    if not 0 < held_out < len(conversations):
        raise ValueError(f"held_out is {held_out}; of {len(conversations)} conversations some must remain to train on")
    counts = conversations.token_counts(description.vocabulary_size)
    backbone = description.backbone
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
        vocabulary_size=description.vocabulary_size,
        stop_token_id=description.stop_token_ids[0],
        layers=layers or (1 if kind is Kind.EAGLE3 else 2),
        block_size=block_size,
        taps=tuple(map(int, taps.split(","))) if taps else tuple(spread_taps(len(backbone.layers))),
        mask_token_id=unused_token(conversations, description.vocabulary_size) if mask_token is None else mask_token,
        head=head,
        markov_rank=markov_rank if kind is Kind.DSPARK else 0,
    )
    drafter = make_drafter(config, model.get_input_embeddings().weight)
    start_from_target(drafter, model, range(config.target_layers - config.layers, config.target_layers))
    if isinstance(drafter, BlockDrafter) and drafter.markov_head is not None:
        drafter.markov_head.start_from_bigrams(conversations.ids, counts, BIGRAM_TOKENS)
    if start_from is not None:
        load_checkpoint(drafter, start_from)
    output.mkdir(parents=True, exist_ok=True)
    names = [f"{path.name} {path.stat().st_size}" for path in description.files]
    if compiled:
        for layer in [*model.model.layers, *drafter.layers]:
            layer.compile()
        losses.compare = torch.compile(losses.compare)
    store = FeatureStore(features or output / "features", conversations, config.taps, model, " ".join(names))
    parameters = sum(value.numel() for value in drafter.parameters())
    console.print(
        f"{kind}: {parameters / 1e6:.1f} million parameters, {len(conversations)} conversations with "
        f"{conversations.response_tokens / 1e6:.2f} million response tokens, {held_out} of them held out."
    )
    settings = Settings(
        minutes, learning_rate, cross_entropy_first, rows, accumulate, anchors, evaluate_every, seed, bf16
    )
    (output / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    lm_head = model.get_output_embeddings().weight
    vocabulary = LossVocabulary(counts, loss_vocabulary, loss_samples)
    Trainer(drafter.to(device), lm_head, store, held_out, vocabulary, settings, output).run()


def unused_token(conversations: Conversations, vocabulary_size: int) -> int:
    """The first token that no conversation has."""
    counts = torch.bincount(conversations.ids.flatten(), minlength=vocabulary_size)
    unused = (counts == 0).nonzero()
    if not len(unused):
        raise ValueError("every token occurs in the data; give --mask-token")
    return int(unused[0])


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ExportError, ValueError) as error:
        console.print(f"error: {error}", style="red")
        raise SystemExit(1) from error

"""The training loop: steps, evaluations and checkpoints within a given time."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from checkpoint import check_same_drafter, save_checkpoint
from confidence import fit_confidence
from conversations import sample_anchors
from drafters import Drafter
from features import FeatureStore
from losses import WHOLE_VOCABULARY, Losses, LossVocabulary, LossWeights, Vocabulary, compare, compute_losses
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

__all__ = ["Settings", "Trainer"]

WARM_UP = 0.03
"""Share of the time in which the learning rate rises."""
EVALUATION_ANCHORS = 16
"""Drafts of each conversation held out."""


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
        seed: Makes the run repeatable, but for its length.
        bf16: Whether matrix products are computed in bfloat16.
        compiled: Whether what compares distributions is compiled.
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
    compiled: bool

    def __post_init__(self) -> None:
        for name in ("minutes", "learning_rate", "rows", "accumulate", "anchors", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.cross_entropy_first <= 1:
            raise ValueError(f"cross_entropy_first is {self.cross_entropy_first}; it must be from 0 to 1")


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
        console: Shows the progress.
    """

    def __init__(
        self,
        drafter: Drafter,
        lm_head: Tensor,
        store: FeatureStore,
        held_out: int,
        vocabulary: LossVocabulary,
        settings: Settings,
        output: Path,
        console: Console,
    ) -> None:
        self._drafter = drafter
        self._lm_head = lm_head
        self._store = store
        self._held_out = held_out
        self._vocabulary = vocabulary
        self._settings = settings
        self._output = output
        self._console = console
        self._comparison = torch.compile(compare) if settings.compiled else compare
        self._optimizers = make_optimizers(drafter, settings.learning_rate)
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._step = 0
        self._seconds = 0.0

    def run(self) -> None:
        """Trains until the time is over; evaluates and saves in between and at the end.

        Raises:
            ArithmeticError: A gradient is not finite; the last checkpoint stays.
            ValueError: The output holds a run of another drafter, or nothing can be evaluated.
        """
        budget, interval = 60 * self._settings.minutes, 60 * self._settings.evaluate_every
        if not self._resume():
            self._report(None)
        if self._seconds >= budget:
            self._console.print(f"{self._output} is finished: it has trained for {self._seconds / 60:.1f} minutes.")
        batches, due = self._batches(), self._seconds + interval
        losses: list[float] = []
        while self._seconds < budget:
            start = perf_counter()
            losses.append(self._train(next(batches), self._seconds / budget))
            self._seconds += perf_counter() - start
            self._step += 1
            if self._seconds >= min(due, budget):
                self._save()
                self._report(sum(losses) / len(losses))
                due += interval
                losses.clear()

    def fit_confidence(self, store: FeatureStore) -> None:
        """Fits the confidence head to conversations that were not trained on, and saves it.

        Args:
            store: These conversations.

        Raises:
            ValueError: The drafter has no confidence head.
        """
        head = self._drafter.confidence_head
        if head is None:
            raise ValueError(f"a {self._drafter.config.kind} drafter has no confidence head to fit")
        generator = torch.Generator().manual_seed(self._settings.seed)
        inputs, acceptance = [], []
        reading = head.proj.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].float()))
        with torch.no_grad():
            for at in track(range(0, len(store.conversations), self._settings.rows), description="Fitting confidences"):
                indices = list(range(at, min(at + self._settings.rows, len(store.conversations))))
                losses, valid = self._losses(
                    store, indices, self._settings.anchors, WHOLE_VOCABULARY, LossWeights(), generator
                )
                inputs[-1] = inputs[-1][valid]
                acceptance.append(losses.acceptance[valid])
        reading.remove()
        fit_confidence(head, torch.cat(inputs), torch.cat(acceptance))
        self._save()
        self._report(None)

    def _batches(self) -> Iterator[list[list[int]]]:
        """For each step the passes' conversations; every one once, in random order, before any comes again."""
        count = len(self._store.conversations) - self._held_out
        order: list[int] = []

        def take() -> list[int]:
            while len(order) < self._settings.rows:
                order[:0] = (torch.randperm(count, generator=self._generator) + self._held_out).tolist()
            return [order.pop() for _ in range(self._settings.rows)]

        while True:
            yield [take() for _ in range(self._settings.accumulate)]

    def _train(self, passes: list[list[int]], progress: float) -> float:
        """One step of the optimisers; returns the loss."""
        settings = self._settings
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(progress)
        early = progress < settings.cross_entropy_first
        weights = LossWeights(cross_entropy=1.0, distance=0.0) if early else LossWeights()
        total = 0.0
        for indices in passes:
            vocabulary = self._vocabulary.draw(self._generator)
            losses, _ = self._losses(self._store, indices, settings.anchors, vocabulary, weights, self._generator)
            (losses.total / len(passes)).backward()
            total += float(losses.total.detach()) / len(passes)
        norm = nn.utils.clip_grad_norm_(self._drafter.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise ArithmeticError(f"step {self._step}: the gradient is not finite; try a smaller --learning-rate")
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _losses(
        self,
        store: FeatureStore,
        indices: list[int],
        anchors: int,
        vocabulary: Vocabulary,
        weights: LossWeights,
        generator: torch.Generator,
    ) -> tuple[Losses, Tensor]:
        """Losses of some conversations, and which slots are valid."""
        device, drafter = self._lm_head.device, self._drafter
        rows = store.rows(indices)
        places, valid = sample_anchors(rows.responses, anchors, drafter.config.block_size, generator)
        rows, places, valid = rows.to(device, self._lm_head.dtype), places.to(device), valid.to(device)
        bias = None if drafter.markov_head is None else drafter.markov_head.markov_w2
        with torch.autocast(device.type, torch.bfloat16, enabled=self._settings.bf16):
            drafted = drafter(rows, places)
            losses = compute_losses(
                *(drafted, rows, places, valid, self._lm_head, bias, vocabulary.to(device), weights, self._comparison)
            )
        return losses, valid

    @torch.no_grad()
    def _report(self, loss: float | None) -> None:
        """Evaluates on the conversations held out, over the whole vocabulary; prints a line and logs it."""
        generator = torch.Generator().manual_seed(0)  # the same anchors every time
        size, drafts = self._drafter.config.block_size, 0
        acceptance, length, greedy_length, bias = torch.zeros(size), 0.0, 0.0, 0.0
        for at in range(0, self._held_out, self._settings.rows):
            indices = list(range(at, min(at + self._settings.rows, self._held_out)))
            losses, valid = self._losses(
                self._store, indices, EVALUATION_ANCHORS, WHOLE_VOCABULARY, LossWeights(), generator
            )
            assert losses.agreement is not None
            whole = valid[..., -1]  # blocks that end inside the response
            drafts += int(whole.sum())
            acceptance += losses.acceptance[whole].sum(dim=0).cpu()
            length += float(losses.acceptance[whole].cumprod(dim=-1).sum())
            greedy_length += float(losses.agreement[whole].cumprod(dim=-1).sum())
            bias += float(losses.confidence_bias[whole].sum())
        if not drafts:
            raise ValueError(f"no response among the {self._held_out} conversations held out is {size + 1} tokens long")
        figures = {
            "minutes": round(self._seconds / 60, 2),
            "step": self._step,
            "loss": None if loss is None else round(loss, 4),
            "acceptance_length": round(1 + length / drafts, 4),
            "greedy_acceptance_length": round(1 + greedy_length / drafts, 4),
            "acceptance": [round(value, 4) for value in (acceptance / drafts).tolist()],
            "confidence_bias": round(bias / drafts / size, 4),
        }
        with (self._output / "log.jsonl").open("a") as log:
            log.write(json.dumps(figures) + "\n")
        self._console.print(
            f"{figures['minutes']:7.1f} min  step {self._step:6d}  loss {'-' if loss is None else f'{loss:.3f}'}  "
            f"held-out acceptance length {figures['acceptance_length']:.3f} (likeliest tokens "
            f"{figures['greedy_acceptance_length']:.3f}), by position "
            + " ".join(f"{value:.2f}" for value in (acceptance / drafts).tolist())
            + f"  confidence {figures['confidence_bias']:+.3f}",
            soft_wrap=True,
        )

    def _save(self) -> None:
        save_checkpoint(self._drafter, self._output)
        state = {
            "config": self._drafter.config.as_json(),
            "drafter": self._drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "generator": self._generator.get_state(),
            "step": self._step,
            "seconds": self._seconds,
        }
        partial = self._output / "state.partial"
        torch.save(state, partial)
        partial.replace(self._output / "state.pt")

    def _resume(self) -> bool:
        """Goes on from the last checkpoint; whether there is one."""
        path = self._output / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True, map_location=self._lm_head.device)
        check_same_drafter(state["config"], self._drafter, f"{path} is of a run whose", "; choose another --output")
        self._drafter.load_state_dict(state["drafter"])
        for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self._generator.set_state(state["generator"].cpu())
        self._step, self._seconds = state["step"], state["seconds"]
        self._console.print(f"Going on after {self._seconds / 60:.1f} minutes, step {self._step}.")
        return True


def schedule(progress: float) -> float:
    """Factor on the learning rate: a short rise, then a fall to zero that is slow at both ends."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    return 0.5 + 0.5 * math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))


def make_optimizers(drafter: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, AdamW for all else."""
    matrices, others = [], []
    for name, parameter in drafter.named_parameters():
        inner = parameter.ndim == 2 and not name.startswith(("markov_head.markov_", "confidence_head."))
        (matrices if inner else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]

"""Generates with and without speculation and compares: same text, how much faster.

Usage: demo.py BUNDLE
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dspark.runtime import Completion, DSparkInference, SamplingParams, SpeculationOptions

PROMPTS = Path(__file__).parent.parent / "prompts"
DATASETS = ("gsm8k", "mbpp", "mt-bench")
PARAMS = SamplingParams(max_new_tokens=128)


def main(bundle: Path) -> None:
    console = Console()
    with console.status("Loading, and measuring what steps cost here"):
        ways = {
            "plain": DSparkInference.load(bundle, options=SpeculationOptions("off"), batch_size=1),
            "speculative": DSparkInference.load(bundle, batch_size=1),
        }
    completions: dict[str, list[Completion]] = {name: [] for name in ways}
    for dataset in DATASETS:
        prompt = json.loads((PROMPTS / f"{dataset}.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
        console.rule(dataset)
        console.print(prompt, style="bold", markup=False, highlight=False)
        for name, model in ways.items():
            with console.status(f"Generating ({name})"):
                completions[name] += model.generate([prompt], PARAMS)
        console.print(completions["speculative"][-1].text, markup=False, highlight=False)

    speeds = {name: _tokens_per_second(done) for name, done in completions.items()}
    rounds = sum(done.stats.rounds for done in completions["speculative"])
    accepted = sum(sum(done.stats.accepted_lengths) for done in completions["speculative"])
    table = Table("SmolLM2-135M-Instruct, fp32, batch 1", "")
    table.add_row("plain, tokens/s", f"{speeds['plain']:.1f}")
    table.add_row("speculative, tokens/s", f"{speeds['speculative']:.1f}")
    table.add_row("ratio", f"{speeds['speculative'] / speeds['plain']:.2f}")
    table.add_row("acceptance length", f"{1 + accepted / rounds:.2f}")
    console.rule()
    console.print(table)
    pairs = zip(completions["plain"], completions["speculative"], strict=True)
    same = all(plain.token_ids == speculative.token_ids for plain, speculative in pairs)
    console.print(f"Outputs are {'identical' if same else 'DIFFERENT'} with and without speculation.")


def _tokens_per_second(completions: list[Completion]) -> float:
    """Decoding speed, without the prompt."""
    tokens = sum(len(done.token_ids) - 1 for done in completions)
    return tokens / sum(done.stats.seconds - (done.stats.time_to_first_token or 0.0) for done in completions)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

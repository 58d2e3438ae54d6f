"""Replay beside importance weights in TRL's own trainer, under the same evicting sampler.

    python benchmarks/trl_shadow_vs_tis.py [--seeds 0 1 2] [--arms shadow tis] [--minutes 25]
    python benchmarks/trl_shadow_vs_tis.py --table         the table of what has been run, as in the docs

For each seed the SFT stage of fit makes the default testbed's model, and the export of it is a checkpoint of
transformers. EvictingGRPOTrainer trains a LoRA adapter of it on sums of five digits: equal prompts, learning
rate and number of rollouts in each arm, TRL's default loss, no KL term. `shadow` replays the evictions;
`tis` is truncated importance sampling (TRL's `token_truncate` with min(ρ, 2)) with the learner that sees
every key; `naive` has no correction. Accuracy is greedy, on held-out problems, with all keys and under the
budget.

Runs what is missing in benchmarks/results/trl_shadow_vs_tis.jsonl, one after another on one thread, and stops
to start new runs when the minutes are over; started again, it goes on.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import fit_process
import record
import torch
from datasets import Dataset
from peft import LoraConfig
from study_parts.analysis import mean_sd
from text_table import text_table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv import CacheSpec, generate, prepare_backbone
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer
from lit_rlkv.tasks import ChainSum

NAME = "trl_shadow_vs_tis"
ARMS = ("shadow", "tis")
TASK = ChainSum(n_terms=5)
CACHE = {"policy": "random", "budget": 16, "interval": 5, "sink": 1, "window": 3}
N_PROMPTS, GROUP_SIZE, N_TOKENS, N_PARTS = 32, 8, 24, 2
"""Prompts of a rollout, responses to each, longest response, and optimizer steps on a rollout."""
N_EVALUATED = 1024
LR = 3e-4
"""The common rate of the study; at 1e-3 the first steps cost much accuracy with all keys."""
VIEWS = {"sparse": CacheSpec(**CACHE), "dense": CacheSpec.dense()}


def starting_model(seed: int, runs_dir: Path) -> Path:
    """Return the exported SFT model of a seed, which is made once."""
    folder = runs_dir / NAME / f"sft-{seed}"
    if not (folder / "config.json").is_file():
        run = fit_process.fit(runs_dir / NAME / f"fit-{seed}", runs_dir, ["stages=[sft]", f"seed={seed}"])
        shutil.rmtree(folder, ignore_errors=True)
        export = [sys.executable, "-m", "lit_rlkv.export", f"ckpt={run}", f"to={folder}"]
        subprocess.run(export, cwd=record.ROOT, check=True, capture_output=True)
    return folder


def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: CacheSpec) -> float:
    """Return the share of held-out problems that greedy decoding answers right."""
    problems = PromptSource(TASK, split="eval", seed=0).take(N_EVALUATED)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    rollout = generate(
        model.eval(),
        prompts.input_ids,
        prompts.attention_mask,
        cache=cache,
        max_new_tokens=N_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        temperature=0.0,
        generator=torch.Generator().manual_seed(0),
    )
    texts = decode_completions(tokenizer, rollout.input_ids, rollout.response_mask)
    return statistics.mean(TASK.score(*pair) for pair in zip(problems, texts, strict=True))


def run(arm: str, seed: int, n_rollouts: int, runs_dir: Path) -> dict[str, Any]:
    """Train one arm, and return the row of the record."""
    path = starting_model(seed, runs_dir)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = prepare_backbone(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    before = {view: accuracy(model, tokenizer, cache) for view, cache in VIEWS.items()}
    problems = PromptSource(TASK, split="train", seed=seed).take(N_PROMPTS * n_rollouts)
    by_prompt = {problem.prompt: problem for problem in problems}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [TASK.score(by_prompt[p], text) for p, text in zip(prompts, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        config = EvictingGRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=N_PARTS * n_rollouts,
            per_device_train_batch_size=N_PROMPTS * GROUP_SIZE // N_PARTS,
            steps_per_generation=N_PARTS,
            num_generations=GROUP_SIZE,
            max_completion_length=N_TOKENS,
            learning_rate=LR,
            adam_beta2=0.98,
            correction=arm,
            **{f"cache_{name}": value for name, value in CACHE.items()},
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = EvictingGRPOTrainer(
            model,
            reward,
            config,
            train_dataset=Dataset.from_dict({"prompt": [problem.prompt for problem in problems]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        started_at = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started_at
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    trained = trainer.model.get_base_model()
    after = {view: accuracy(trained, tokenizer, cache) for view, cache in VIEWS.items()}
    return {
        "arm": arm,
        "seed": seed,
        "n_rollouts": n_rollouts,
        "lr": LR,
        "cache": CACHE,
        **{f"{view}_before": value for view, value in before.items()},
        **{f"{view}_after": value for view, value in after.items()},
        "gap": max(entry.get("kv/replay_gap", 0.0) for entry in logged),
        "rewards": [round(entry["reward"], 4) for entry in logged],
        "rl_seconds": round(seconds, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: accuracy in percent by seed, and its mean gain under the budget."""

    def percents(mine: Sequence[dict[str, Any]], name: str) -> str:
        return ", ".join(f"{100 * row[name]:.1f}" for row in mine)

    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        views = [percents(mine, f"{view}_{when}") for view in VIEWS for when in ("before", "after")]
        gains = mean_sd([row["sparse_after"] - row["sparse_before"] for row in mine])
        found.append([arm, *views, gains, f"{max(row['gap'] for row in mine):.1g}"])
    headings = ["correction", "budget before", "budget after", "dense before", "dense after", "points gained"]
    return [*headings, "largest gap"], found


def finished(n_rollouts: int) -> list[dict[str, Any]]:
    """Return the rows of the record at these numbers of rollouts."""
    return [row for row in record.rows(NAME) if row["n_rollouts"] == n_rollouts and row["lr"] == LR]


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=("shadow", "tis", "mis", "naive"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=40, help="rollouts of each run")
    parser.add_argument("--minutes", type=float, default=25, help="no run is started after so many")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument(
        "--table", action="store_true", help="print what has been run in Markdown, run nothing"
    )
    args = parser.parse_args()
    if args.table:
        headings, rows = table(finished(args.rollouts))
        for line in (headings, ["---"] * len(headings), *rows):
            print(f"| {' | '.join(line)} |")
        return
    torch.set_num_threads(1)
    stop_at = time.monotonic() + 60 * args.minutes
    done = {(row["arm"], row["seed"]) for row in finished(args.rollouts)}
    missing = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in done]
    for place, (arm, seed) in enumerate(missing):
        if time.monotonic() >= stop_at:
            sys.exit(f"the time is over, and {len(missing) - place} runs are left; start again to go on")
        row = run(arm, seed, args.rollouts, args.runs_dir.absolute())
        record.append(NAME, row)
        views = ", ".join(
            f"{view} {100 * row[f'{view}_before']:.1f} -> {100 * row[f'{view}_after']:.1f}" for view in VIEWS
        )
        print(f"{arm:7} seed {seed}  {views}  {row['rl_seconds']} s", flush=True)
    print(text_table(*table(finished(args.rollouts))))


if __name__ == "__main__":
    main()

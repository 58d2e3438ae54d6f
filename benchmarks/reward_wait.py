"""Seconds from the end of the last response until all rewards are there, with a slow reward function.

    python benchmarks/reward_wait.py [--responses 64] [--tokens 192] [--seconds 0.1] [--workers 2]

A small model samples responses of random lengths, and a Python function in worker processes sleeps for each.
It is asked after the rollout, or for each response once it has ended: both in turns, with equal responses;
medians over rounds. Nothing runs between rollout and rewards, so `time/reward` of a run that also scores is
shorter. Rows go to benchmarks/results/reward_wait.jsonl.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import command_line
import record
import torch
from text_table import text_table
from torch import Tensor

from lit_rlkv import CacheSpec, generate, prepare_backbone
from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.experience.sample import generate_options
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.rewards import PythonFunction, RewardManager
from lit_rlkv.types import Problem

LATE, EARLY = "after the rollout", "as responses end"
GROUP_SIZE = 8
SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZE |= {"head_dim": 64, "intermediate_size": 768}
FUNCTION = """
import time

def score(completion):
    time.sleep({seconds})
    return len(completion)
"""
CACHE = CacheSpec("snapkv", budget=64, interval=16, sink=2, window=8)


def measure(when: str, manager: RewardManager, n_responses: int, n_tokens: int) -> dict[str, float]:
    """Return the seconds of a rollout and of the wait for its rewards, mean length and mean reward."""
    tokenizer = build_task_tokenizer()
    torch.manual_seed(0)
    model = prepare_backbone(
        tiny_qwen3(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, **SIZE)
    )
    prompts = torch.randint(3, len(tokenizer), (n_responses // GROUP_SIZE, 12))
    pending = manager.begin([Problem("", "", "")] * n_responses)

    def ask(rows: list[int], input_ids: Tensor, response_mask: Tensor) -> None:
        pending.add(rows, decode_completions(tokenizer, input_ids, response_mask))

    started_at = time.perf_counter()
    rollout = generate(
        prepare_backbone(model),
        prompts,
        torch.ones_like(prompts),
        cache=CACHE,
        generator=torch.Generator().manual_seed(0),
        num_return_sequences=GROUP_SIZE,
        on_finished=ask if when == EARLY else None,
        **generate_options(tokenizer, RolloutConfig(max_new_tokens=n_tokens)),
    )
    ended_at = time.perf_counter()
    if when == LATE:
        ask(list(range(n_responses)), rollout.input_ids, rollout.response_mask)
    scores = pending.collect().scores["slow"]
    return {
        "rollout_s": ended_at - started_at,
        "wait_s": time.perf_counter() - ended_at,
        "mean_length": float(rollout.response_mask.sum() / n_responses),
        "mean_reward": float(scores.mean()),
    }


def medians(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure both orders in turns."""
    found: dict[str, list[dict[str, float]]] = {LATE: [], EARLY: []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grader.py"
        file.write_text(FUNCTION.format(seconds=args.seconds))
        slow = PythonFunction(path=f"{file}:score", n_workers=args.workers, timeout_s=60 + args.seconds)
        with RewardManager({"slow": slow}) as manager:
            measure(LATE, manager, args.responses, 1)  # starts the workers
            for _ in range(args.rounds):
                for when, rows in found.items():
                    rows.append(measure(when, manager, args.responses, args.tokens))
    return {
        when: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for when, rows in found.items()
    }


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--responses", type=int, default=64, help=f"a multiple of {GROUP_SIZE}")
    parser.add_argument("--tokens", type=int, default=192, help="longest response")
    parser.add_argument("--seconds", type=float, default=0.1, help="of the reward function, for one response")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = medians(args)
    rows = [
        [when, f"{row['rollout_s']:.2f}", f"{row['wait_s']:.2f}", f"{row['mean_reward']:.4f}"]
        for when, row in found.items()
    ]
    print(text_table(["rewards are asked", "rollout, s", "wait for rewards, s", "mean reward"], rows))
    print(
        f"{args.responses} responses of {found[EARLY]['mean_length']:.0f} tokens on average, at most "
        f"{args.tokens}; {args.seconds:g} s for a reward, {args.workers} workers: "
        f"{args.responses * args.seconds / args.workers:.2f} s for all"
    )
    if not args.no_record:
        sizes = {"n_responses": args.responses, "max_new_tokens": args.tokens}
        sizes |= {"reward_s": args.seconds, "n_workers": args.workers, "n_rounds": args.rounds}
        for when, row in found.items():
            record.append("reward_wait", {"asked": when, **sizes, **row})


if __name__ == "__main__":
    main()

"""How long a rollout stands still while responses wait for their environments, on a CPU.

    python benchmarks/waiting.py [--rounds 3] [--record]
    python benchmarks/waiting.py --report              the table

64 responses of up to 8 turns to an environment that answers at once, and to ones that sleep for 0.1 to 2 s
or 0.4 to 8 s, at random, in their threads. The model is the one of the default run, untrained: its end token
is one of 51, so that a turn has some 50 tokens and a response some 400.

`waiting_s` are the seconds in which no row could go on without an answer, `forward_s` those in forwards of
the model. What is left samples tokens, evicts, and passes texts on.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import command_line
import record
import torch
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, prepare_backbone
from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.environments import Environment, Observation
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.experience.sample import encode_problems, sample_responses
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.rollout import turns
from lit_rlkv.tasks import Products

NAME = "waiting"
N_ROWS, MAX_TURNS, N_NEW = 64, 8, 640
CACHE = CacheSpec("snapkv", budget=128, interval=16, sink=4, window=8)
SHAPE = {"hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 384}
AT_ONCE, SOON_S, LATE_S = (0.0, 0.0), (0.1, 2.0), (0.4, 8.0)
CASES = ((AT_ONCE, 64), (SOON_S, 64), (SOON_S, 8), (LATE_S, 64))
"""Seconds after which an environment answers, from and to, and `rollout.environment_workers`."""


class Sleeping(Environment):
    """Answers each turn with a number, after a while."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.seconds = seconds

    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        time.sleep(self.seconds())
        return "123456789\n", 0.0, False


class Stopwatch:
    """Counts what runs under it, and adds up its seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.n = 0
        self._began = 0.0

    def start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self.n += 1

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.start()
            try:
                return function(*arguments, **options)
            finally:
                self.stop()

        return watched


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """Measure the forwards of a model, and the waits of a rollout."""
    forward, waiting, layers = Stopwatch(), Stopwatch(), model.base_model
    hooks = [layers.register_forward_pre_hook(forward.start), layers.register_forward_hook(forward.stop)]
    try:
        with patch.object(turns, "wait", waiting.watching(futures.wait)):
            yield forward, waiting
    finally:
        for hook in hooks:
            hook.remove()


def roll_out(model: PreTrainedModel, pause_s: tuple[float, float], n_workers: int, seed: int) -> Rollout:
    draw = random.Random(seed)
    tokenizer = build_task_tokenizer()
    settings = RolloutConfig(
        max_new_tokens=N_NEW,
        max_turns=MAX_TURNS,
        max_observation_tokens=16,
        environment_timeout_s=60.0,
        environment_workers=n_workers,
    )
    problem = Products(n_terms=5).sample(draw)
    pool = EnvironmentPool(partial(Sleeping, partial(draw.uniform, *pause_s)), settings, tokenizer)
    prompts, talk = encode_problems(tokenizer, pool, [problem], N_ROWS)
    generator = torch.Generator().manual_seed(seed)
    return sample_responses(
        model,
        tokenizer,
        prompts,
        settings,
        cache=CACHE,
        generator=generator,
        num_return_sequences=N_ROWS,
        conversations=talk,
    )


def measure(
    model: PreTrainedModel, pause_s: tuple[float, float], n_workers: int, seed: int
) -> dict[str, Any]:
    with watched(model) as (forward, waiting):
        began = time.perf_counter()
        rollout = roll_out(model, pause_s, n_workers, seed)
        seconds = time.perf_counter() - began
    n_turns = turns.turn_starts(rollout.response_mask).sum()
    return {
        "pause_s": pause_s,
        "workers": n_workers,
        "seed": seed,
        "seconds": seconds,
        "forward_s": forward.seconds,
        "waiting_s": waiting.seconds,
        "n_forwards": forward.n,
        "sampled_per_response": float(rollout.response_mask.sum()) / N_ROWS,
        "turns_per_response": float(n_turns) / N_ROWS,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the medians over rounds of the latest version of the package."""
    rows = [row for row in rows if row["source"] == rows[-1]["source"]]
    headings = ["answers", "workers", "rollout, s", "forwards, s", "forwards", "waiting, s", "of the rollout"]
    headings += ["tokens a response", "turns"]
    body = []
    for pause_s, workers in CASES:
        mine = [row for row in rows if (tuple(row["pause_s"]), row["workers"]) == (pause_s, workers)]
        if not mine:
            continue

        def median(value: Callable[[dict[str, Any]], float], mine: list[dict[str, Any]] = mine) -> float:
            return statistics.median(map(value, mine))

        names = {"seconds": 1, "forward_s": 1, "n_forwards": 0, "waiting_s": 1}
        body.append(
            [
                "at once" if pause_s == AT_ONCE else "after {} to {} s".format(*pause_s),
                str(workers),
                *(f"{median(itemgetter(name)):.{digits}f}" for name, digits in names.items()),
                f"{median(lambda row: row['waiting_s'] / row['seconds']):.0%}",
                f"{median(itemgetter('sampled_per_response')):.0f}",
                f"{median(itemgetter('turns_per_response')):.1f}",
            ]
        )
    return markdown_table(headings, body)


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="print the table of what has been measured")
    args: argparse.Namespace = parser.parse_args()
    if not args.report:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        tokenizer = build_task_tokenizer()
        model = prepare_backbone(tiny_qwen3(len(tokenizer), 0, 1, **SHAPE).eval())
        for seed in range(args.rounds):
            for pause_s, n_workers in CASES:
                record.append(NAME, measure(model, pause_s, n_workers, seed))
    print(table(record.rows(NAME)))


if __name__ == "__main__":
    main()

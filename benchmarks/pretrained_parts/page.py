"""The page docs/results/pretrained.md: page.md with the claims and tables of the recorded cells."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from string import Template

from pretrained_parts import claims, tables
from pretrained_parts.claims import KIND_NAMES, SHOWN_BUDGET
from pretrained_parts.results import Results
from pretrained_parts.setting import DENSE, SINK, WINDOW

from lit_rlkv.reporting.tables import markdown_table

TEMPLATE = Path(__file__).parent / "page.md"


def written(results: Results) -> str:
    """Return the whole page; parts whose cells are missing are left out."""
    sections = (accuracy, distance, reweighting, replay, costs, published)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        answer="\n\n".join(claims.answers(results)) or "Nothing has been measured yet.",
        prompts="\n\n".join(claims.prompts(results)),
        sections="\n\n".join(part for section in sections for part in section(results)),
        sink=SINK,
        window=WINDOW,
    )


def accuracy(results: Results) -> Iterator[str]:
    """Return the tables of right answers."""
    groups = {kind: group for kind in ("recall", "few_shot") if (group := results.dense(kind))}
    if groups:
        yield "## Right answers"
    for kind, dense in groups.items():
        yield f"**{KIND_NAMES[kind].capitalize()}**, {dense.n_prompts} of them, greedy, percent right:"
        yield tables.accuracy(results, kind)
        yield from claims.kept(results, kind, dense)


def distance(results: Results) -> Iterator[str]:
    """Return the tables of KL, overlap and perplexity."""
    kinds = [kind for kind in ("chat", "recall", "few_shot") if claims.by_kl(results, kind)]
    if not kinds:
        return
    yield "## Distance from the model with all keys"
    yield "Each cell is the KL per token / overlap p05 / perplexity."
    for kind in kinds:
        dense = results.dense(kind)
        own = f" (perplexity with all keys {dense.perplexity:.2f})" if dense else ""
        yield f"**{KIND_NAMES[kind].capitalize()}**{own}:"
        yield tables.distances(results, kind)
    chats = claims.by_kl(results, "chat")
    if any(group.kl_interval for _, group in chats):
        yield "**The KL in chats as a mean over chats**, which shows how much it differs between them:"
        yield tables.kl_intervals(results, "chat")
    if chats:
        yield f"**The KL by token of the response**, chats under {SHOWN_BUDGET} keys:"
        yield tables.positions(results, "chat", SHOWN_BUDGET)


def reweighting(results: Results) -> Iterator[str]:
    """Return the table of effective shares."""
    shares = claims.sequence_shares(results)
    if not shares:
        return
    n_rows, n_tokens, _ = shares
    row = next(iter(results.rollouts("long").values()))
    budget, n_prompt = row["cell"]["budget"], round(statistics.mean(row["n_prompt_tokens"]))
    yield "## What reweighting keeps"
    yield from claims.clipping(results)
    yield tables.weights(results)
    yield (
        f"{n_rows} sequences of {n_tokens:,} tokens behind prompts of about {n_prompt}, sampled at "
        f"temperature 1 under {budget} keys, past end tokens. *sequences* and *tokens* are effective shares; "
        f"the least possible one of sequences is 1/{n_rows} = {1 / n_rows:.2f}. The last two columns are of "
        "all tokens."
    )


def replay(results: Results) -> Iterator[str]:
    """Return the table of replay gaps."""
    found = {"float32": results.rollouts("long"), "bfloat16": results.rollouts("bf16")}
    if not any(found.values()):
        return
    yield "## Replay gap"
    yield from claims.gap(results)
    yield from claims.rounding(results)
    yield tables.gaps(results)
    sizes = [f"{name}: {_sampled(next(iter(rows.values()))['cell'])}" for name, rows in found.items() if rows]
    yield f"In nats, over all response tokens. {'; '.join(sizes)}. *dense* has no eviction."


def _sampled(cell: dict) -> str:
    return f"{cell['rows']} sequences of {cell['tokens']:,} tokens under {cell['budget']} keys"


def costs(results: Results) -> Iterator[str]:
    """Return the table of bytes and speed."""
    dense, rows = results.rollout("long", DENSE), results.rollouts("long")
    if not rows:
        return
    row = next(iter(rows.values()))
    cell = row["cell"]
    yield "## Memory and speed"
    if dense:
        yield (
            f"**{cell['budget']} keys take {tables.mib(row)} MiB of KV cache a sequence, all keys "
            f"{tables.mib(dense)} MiB**, for a prompt and {cell['tokens']:,} response tokens."
        )
    speeds = [tables.tokens_per_second(row) for row in rows.values()]
    beside = f", and {tables.tokens_per_second(dense):.0f} with all keys" if dense else ""
    yield (
        f"**{min(speeds):.0f} to {max(speeds):.0f} tokens are sampled per second under {cell['budget']} keys"
        f"{beside}**, {cell['rows']} sequences at a time, in float32 on one machine ({row['device']}), each "
        "measured once, with other work on the machine."
    )
    yield tables.costs(results)


def published(results: Results) -> Iterator[str]:
    """Return the order of the policies here beside the published ones."""
    names = {
        "recall": "documents here, mean accuracy over budgets",
        "few_shot": "few-shot questions here, mean accuracy over budgets",
        "chat": "chats here, geometric mean of the KL over budgets",
    }
    body = [[name, listed] for kind, name in names.items() if (listed := claims.order(results, kind))]
    if body:
        yield "## Beside published rankings"
        yield markdown_table(["measurement", "best first"], [*body, *PUBLISHED])
        yield DIFFERENCES


PUBLISHED = [
    [
        "kvpress' [RULER at 4k tokens](https://github.com/NVIDIA/kvpress/blob/main/evaluation/README.md), "
        "Llama-3.1-8B",
        "`snapkv` that sees the question; of those that do not, `expected`",
    ],
    [
        "the same on Phi-3.5-mini and Mistral-Nemo",
        "`random` and `streaming` before the scores that do not see the question",
    ],
    [
        "Expected Attention ([2510.00636](https://arxiv.org/abs/2510.00636)), prefill and decoding",
        "`expected` before its baselines",
    ],
    [
        "decoding of reasoning models ([2512.12008](https://arxiv.org/abs/2512.12008))",
        "`h2o` and a `snapkv` that also evicts while decoding; no single best one for Llama-3.1-8B",
    ],
]
"""Orders as their authors put them; exact scores are not compared."""

DIFFERENCES = """\
**Rankings differ because settings differ.** kvpress compresses a context once, by a ratio, and mostly before
the question is known. Here:

- **The question has been read** when the prompt is cut back. Policies that look at the latest queries
  (`snapkv`, `rkv`, `tova`, `expected`) score by it, like kvpress' query-aware SnapKV. This helps
  where a few keys hold the answer; in a few-shot prompt every example counts a little.
- **Keys are evicted again and again** while the response grows, its own keys too, and never come back. A
  score must be right many times.
- **`expected` is another estimator.** It fits a Gaussian to the latest 8 rotated queries, kvpress to the
  queries of the whole context before RoPE.
- **Budgets are small** and absolute, and so is the model."""

"""Rows of a log in the fields of vLLM, SGLang, TRL, verl, prime-rl or this package, as `LogRow`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lit_rlkv.eviction_logs import from_kept
from lit_rlkv.log_row import LogRow
from lit_rlkv.models.backbone import check_length
from lit_rlkv.models.replay import check_rollout
from lit_rlkv.settings import show
from lit_rlkv.tasks.hub import load, numbered_rows
from lit_rlkv.tasks.json_rows import numbered_values
from lit_rlkv.types import Rollout

PROMPT = ("prompt_ids", "prompt_token_ids", "prompts", "input_ids")
RESPONSE = ("response_ids", "completion_ids", "token_ids", "output_ids", "responses")
LOGPS = (
    *("logps", "logprobs", "sampling_per_token_logps", "rollout_log_probs"),
    *("inference_logprobs", "completion_logprobs"),
)
MASKS = ("is_sampled", "response_mask", "completion_mask", "tool_mask", "env_mask")
"""Names that engines and trainers give to the parts of a row; a sampled token is 1 in all masks."""
CHOICES = ("choices", "outputs")
"""Names of the list of samples of one prompt."""
WHOLE_MASKS = ("loss_mask", "mask")
"""Names of a mask over prompt and response where a row has both in one list, as in prime-rl's exports."""
TIMES, KEPT = "evicted_at", "kept"
"""Evictions: times [layer, kv_head, token], or compactions {"at": position, "kept": positions}."""
Rows = tuple[list[LogRow], list[str], list[str]]
"""Rows, the place of each, and what is wrong with others."""
N_SAID = 3
"""Faults that an error names."""


class NoRowError(ValueError):
    """No row of a log can be compared; `broken` has what is wrong with each."""

    def __init__(self, broken: Sequence[str]) -> None:
        more = f"; and {len(broken) - N_SAID} more" if len(broken) > N_SAID else ""
        super().__init__(f"no row can be compared: {'; '.join(broken[:N_SAID])}{more}")
        self.broken = [*broken]


def read_log(path: Path) -> Rows:
    """Return the rows of a file of JSON lines or a Parquet file, their places, and the faults of others.

    Raises:
        FileNotFoundError: there is no such file.
        NoRowError: no row of it can be read.
        ValueError: it cannot be read.
        ImportError: the package datasets is needed for it, and missing.
    """
    rows, places, broken = [], [], []
    values = numbered_values(path) if path.suffix in (".json", ".jsonl") else _table(path)
    for place, value in values:
        for name, sample in samples_of(value):
            try:
                if isinstance(sample, ValueError):  # of a line that is not JSON
                    raise sample
                if not isinstance(sample, Mapping):
                    given = f"got {sample!r:.80}"
                    raise ValueError(f"a row must be an object with token ids and log-probs, {given}")
                rows.append(row_of(sample))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                broken.append(f"{place}{name}: {error}")
            else:
                places.append(f"{place}{name}")
    if not rows:
        raise NoRowError(broken)
    return rows, places, broken


def fitting_rows(
    model: PreTrainedModel, rows: Sequence[LogRow], places: Sequence[str], broken: Sequence[str]
) -> Rows:
    """Return the rows that a model can replay together, and the faults of the others after those known.

    Raises:
        NoRowError: there is none.
    """
    fitting, faults = [], [*broken]
    for row, place in zip(rows, places, strict=True):
        try:
            check_length(model, len(row.prompt_ids) + len(row.response_ids), "log shorter rows")
            check_rollout(model, Rollout.from_log([row]))
        except ValueError as error:
            faults.append(f"{place}: {error}")
        else:
            shape = None if row.evicted_at is None else tuple(row.evicted_at.shape[:2])
            fitting.append((row, place, shape))
    shapes = Counter(shape for *_, shape in fitting if shape is not None)
    usual = max(shapes, key=shapes.__getitem__, default=None)
    faults += [
        f"{place}: evicted_at has {shape} layers and KV heads, and that of most rows {usual}; log them alike"
        for _, place, shape in fitting
        if shape not in (None, usual)
    ]
    kept = [(row, place) for row, place, shape in fitting if shape in (None, usual)]
    if not kept:
        raise NoRowError(faults)
    return [row for row, _ in kept], [place for _, place in kept], faults


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    yield from numbered_rows(load(str(path), None, "train"), str(path))


def samples_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the choices of a server's response, each after its name if there are several, or the row."""
    key = next((key for key in CHOICES if isinstance(value, Mapping) and value.get(key)), None)
    samples = None if key is None else value[key]
    if not isinstance(samples, list | tuple):
        yield "", value
        return
    shared = {name: part for name, part in value.items() if name not in (*CHOICES, "logprobs")}
    for place, sample in enumerate(samples):
        name = f" {key}[{place}]" if len(samples) > 1 else ""
        yield name, {**shared, **sample} if isinstance(sample, Mapping) else sample


def row_of(sample: Mapping[str, Any]) -> LogRow:
    """Return a sample as a row.

    Padding before a prompt goes where a mask says so, and so does all after the last sampled token.

    Raises:
        ValueError: a part is missing, or `LogRow` refuses it.
    """
    if _first(sample, PROMPT) is None and (mask := _first(sample, WHOLE_MASKS)) is not None:
        sample = _in_parts(sample, mask)
    details = sample.get("meta_info") or {}  # of SGLang
    response = _first(sample, RESPONSE) or [entry[1] for entry in details.get("output_token_logprobs") or ()]
    prompt = _first(sample, PROMPT) or [entry[1] for entry in details.get("input_token_logprobs") or ()]
    logps: Any = _first(sample, LOGPS) or details.get("output_token_logprobs")
    for name, part, known in (
        ("response", response, (*RESPONSE, *CHOICES)),
        ("logps", logps, LOGPS),
        ("prompt", prompt, PROMPT),
    ):
        if not part:
            empty = [f"{key} is {show(sample[key])}" for key in known if key in sample]
            given = f"{', '.join(empty)}; log it, or leave the row out"
            absent = f"give it as {' or '.join(known)}; it has {', '.join(sample)}"
            raise ValueError(f"no {name}: {given if empty else absent}")
    mask = sample.get("prompt_mask") or (sample.get("attention_mask") or ())[: len(prompt)]
    if any(mask):  # that of verifiers is 0 on every token of a prompt
        if len(mask) != len(prompt):
            raise ValueError(f"a mask has {len(mask)} numbers for {len(prompt)} tokens of the prompt")
        prompt = [token for token, is_token in zip(prompt, mask, strict=True) if is_token]
    masks = [sample[name] for name in MASKS if sample.get(name) is not None]
    if wrong := {*map(len, masks)} - {len(response)}:
        raise ValueError(f"a mask has {wrong.pop()} numbers for {len(response)} tokens of the response")
    is_sampled = [all(marks) for marks in zip(*masks, strict=True)] if masks else [True] * len(response)
    if not any(is_sampled):
        raise ValueError(f"no response: none of its {len(response)} tokens is sampled, by their masks")
    if isinstance(logps, Mapping):  # of a server of vLLM: for chats, and for texts
        logps = logps.get("content") or logps.get("token_logprobs") or ()
    if len(logps) != len(response):
        raise ValueError(f"{len(logps)} log-probs for {len(response)} tokens of the response")
    end = max(place + 1 for place, one in enumerate(is_sampled) if one)
    numbers = [_number(entry, token) for entry, token in zip(logps, response, strict=True)]
    times = sample.get(TIMES)
    if times is None and sample.get(KEPT):
        compactions = [(each["at"], torch.tensor(each["kept"])) for each in sample[KEPT]]
        times = from_kept(len(prompt) + end, compactions)
    return LogRow(prompt, response[:end], numbers[:end], times, is_sampled[:end])


def _in_parts(sample: Mapping[str, Any], mask: Sequence[int]) -> dict[str, Any]:
    """Return a sample whose prompt, all before its first sampled token, stands by itself."""
    start = next((place for place, one in enumerate(mask) if one), len(mask))
    ids, logps = _first(sample, RESPONSE), _first(sample, LOGPS)
    parts: dict[str, Any] = {"is_sampled": mask[start:]}
    if ids:
        parts |= {"prompt_ids": ids[:start], "response_ids": ids[start:]}
    if logps:
        parts["logps"] = logps[start:]
    return {**sample, **parts}


def _first(sample: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first part that is there; what a column of a table has not is None."""
    return next((sample[name] for name in names if sample.get(name) is not None), None)


def _number(entry: Any, token: int) -> Any:
    """Return a log-prob from what an engine puts around it."""
    if isinstance(entry, Mapping):
        entry = entry.get(str(token), entry.get(token, entry))  # the candidates of a token, by id
        return entry["logprob"] if isinstance(entry, Mapping) else entry
    return entry[0] if isinstance(entry, Sequence) else entry

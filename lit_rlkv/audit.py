"""python -m lit_rlkv.audit model=PATH log=FILE: how far a sampler is from the learner, and why."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rlkv.checks import check_temperature
from lit_rlkv.cli import run_command
from lit_rlkv.config import ConfigError, as_config_errors, require
from lit_rlkv.settings import SAMPLING, Sampling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from transformers import PreTrainedModel

USAGE = """Say how far the log-probs of another sampler are from the learner's, and what explains it.

  python -m lit_rlkv.audit model=PATH log=rows.jsonl [temperature=0.7 top_p=0.95] [to=audit.png]

Arguments
  model        checkpoint folder, GGUF file or hub name of the learner
  log          JSON lines or Parquet: in each row token ids of prompt and response, and the log-probs of the
               latter, by the names of vLLM, SGLang, TRL, verl and prime-rl; and evictions, if there were any
               (docs/how-to/from-vllm.md)
  temperature  that the log-probs are of, 1 unless given; top_k, top_p and min_p likewise
  adapter      folder of a peft adapter that the sampler had
  dtype        float32 or bfloat16, in which the learner computes
  rows         most rows that are compared, from the whole file at even distances; 64 unless given
  to           picture to write
  --json       print values for programs: the gap, its causes, and all rows that could not be compared

The exit status is 0 if any row was compared, whatever the gap, and 1 after an error."""
RUNS_DIR = "runs"
_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("model", "dtype"), str),
    **dict.fromkeys(("log", "adapter", "to"), lambda text: Path(text).expanduser()),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("top_k", "rows"), int),
}


@dataclass(frozen=True)
class AuditArguments:
    """A log, its learner, and how to answer."""

    model: str
    log: Path
    sampling: Sampling
    adapter: Path | None = None
    dtype: str = "float32"
    rows: int = 64
    to: Path | None = None
    as_json: bool = False


def main() -> None:
    """Run the command line."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        sys.stdout.write(f"{USAGE}\n")
        return
    run_command(parse, ("lit_rlkv.auditing.causes", "lit_rlkv.reporting.audit_screen"), audit)


def parse(arguments: Sequence[str]) -> AuditArguments:
    """Return what the arguments ask for.

    Raises:
        ConfigError: one is unknown, missing or wrong.
    """
    given = dict(one.partition("=")[::2] for one in arguments if one != "--json")
    unknown = ", ".join(name for name in given if name not in _READ)
    require(not unknown, f"unknown argument {unknown}; choose of {', '.join(_READ)}")
    require("model" in given and "log" in given, "an audit needs model=PATH and log=FILE; --help says more")
    values: dict[str, Any] = {}
    for name, text in given.items():
        try:
            values[name] = _READ[name](text)
        except ValueError as error:
            raise ConfigError(f"{name} must be a number, got {text}") from error
    with as_config_errors("audit"):
        sampling = Sampling(**{name: values.pop(name) for name in SAMPLING if name in values})
        check_temperature("temperature", sampling.temperature, is_greedy_allowed=False)
    asked = AuditArguments(**values, sampling=sampling, as_json="--json" in arguments)
    require(asked.rows > 0, f"rows must be at least 1, got {asked.rows}")
    require(asked.dtype in ("float32", "bfloat16"), f"dtype must be float32 or bfloat16, got {asked.dtype}")
    require(asked.log.is_file(), f"log={asked.log} is no file; give JSON lines or Parquet")
    require(
        asked.adapter is None or (asked.adapter / "adapter_config.json").is_file(),
        f"adapter={asked.adapter} is no folder of a peft adapter (no adapter_config.json there)",
    )
    require(
        asked.to is None or (asked.to.suffix in (".png", ".svg") and asked.to.absolute().parent.is_dir()),
        f"to={asked.to} must be a file .png or .svg in a folder that exists",
    )
    return asked


def audit(asked: AuditArguments) -> None:
    """Print the audit, and draw it if asked to.

    Raises:
        ConfigError: the model, the adapter or the log cannot be read.
    """
    import torch
    from rich.console import Console

    from lit_rlkv.auditing.causes import Audit
    from lit_rlkv.auditing.engine_rows import NoRowError, fitting_rows, read_log
    from lit_rlkv.reporting.audit_screen import as_values, picture, screen
    from lit_rlkv.reporting.progress import QUIET_S, ProgressMeter

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with as_config_errors("log"):
        try:
            rows, places, broken = read_log(asked.log)
            model = prepared(asked.model, getattr(torch, asked.dtype), device)
            rows, places, broken = fitting_rows(model, rows, places, broken)
        except NoRowError as error:
            if asked.as_json:
                sys.stdout.write(json.dumps({"rows": 0, "left_out": error.broken}, indent=1) + "\n")
            raise
        n = min(asked.rows, len(rows))
        chosen = [each * len(rows) // n for each in range(n)]
        rows, places = [rows[each] for each in chosen], [places[each] for each in chosen]
        without_adapter = None if asked.adapter is None else load_adapter(model, asked.adapter)
        meter = ProgressMeter("audit", quiet_s=QUIET_S)
        found = Audit(model, rows, asked.sampling, without_adapter, lambda n, total: meter.show(n, total, {}))
        try:
            values = as_values(found, places, broken)
        finally:
            meter.stop()
    if asked.as_json:
        sys.stdout.write(json.dumps(values, indent=1) + "\n")
    else:
        Console(soft_wrap=True).print(screen(values), markup=False, highlight=False)
    if asked.to is not None:
        picture(found).savefig(asked.to)


def prepared(path: str, dtype: "torch.dtype", device: str) -> "PreTrainedModel":
    """Return the learner's model, ready for replay.

    Raises:
        ConfigError: it cannot be loaded, or not replayed.
    """
    from lit_rlkv.models.loading import load_causal_lm
    from lit_rlkv.models.preparation import prepare_backbone
    from lit_rlkv.runs.starting_model import pretrained_path

    folder = pretrained_path(path, RUNS_DIR, "model")
    assert folder is not None, "it is None of no path alone"
    with as_config_errors("model"):
        model = load_causal_lm(folder, dtype).eval()
        model.to(device)
        return prepare_backbone(model)


def load_adapter(model: "PreTrainedModel", adapter: Path) -> "Callable[[], AbstractContextManager[None]]":
    """Put an adapter into a model, and return what opens a context without it.

    Raises:
        ConfigError: it is not one of this model.
    """
    from peft import PeftModel

    with as_config_errors("adapter"):
        return PeftModel.from_pretrained(model, str(adapter)).eval().disable_adapter


if __name__ == "__main__":
    main()

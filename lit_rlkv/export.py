"""python -m lit_rlkv.export ckpt=... to=DIR: a saved policy for plain transformers and peft."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lit_rlkv.cli import compose_arguments, run_command
from lit_rlkv.config import ConfigError, as_config_errors, check_targets, parse, require
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.files import atomic_dir, read_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from lit_rlkv.runs.model_card import Exported

MANIFEST = "export.json"
"""File in every export that describes it and lists its files; only such a folder may be overwritten."""


def export(asked: ExportConfig, api: "HfApi | None" = None) -> "tuple[Path, Exported]":
    """Write the policy of a saved run atomically, on the CPU, and upload it if asked to.

    Args:
        api: client of the hub, for `push_to`; None: the hub's own with the token of this machine.

    Raises:
        ConfigError: a setting is wrong, there is no such run, the folder exists, or the hub takes no upload.
    """
    import torch
    from huggingface_hub import HfApi

    from lit_rlkv.kvcache.policies import UNTRAINED
    from lit_rlkv.models.kv_scorer import read_kv_scorer, split_kv_scorer
    from lit_rlkv.models.layouts import CRITICS, LAYOUTS
    from lit_rlkv.runs.model_card import model_card
    from lit_rlkv.runs.open_run import check_run, find_run, open_run
    from lit_rlkv.runs.upload import check_upload, upload
    from lit_rlkv.settings import DENSE
    from lit_rlkv.stages.export import export_policy

    run = find_run(Path(asked.ckpt).expanduser())
    # It evicts nothing, so a policy of the user's own needs no trust; the model card names it.
    before = run.cfg.cache, run.cfg.algorithm
    run.cfg.cache, run.cfg.algorithm = ({**group} for group in before)
    run.cfg.cache.policy, run.cfg.cache.policy_options, run.cfg.algorithm.policy_weight = "random", {}, 1.0
    scorer = split_kv_scorer(run.weights)
    if scorer is None and before[0].policy not in (DENSE, *UNTRAINED):
        scorer = read_kv_scorer(run.start)  # which this run did not train
    check_targets(run.cfg)
    folder = Path(asked.to).expanduser().resolve()
    _check_target(folder, asked.overwrite)
    if asked.push_to is not None:
        api = api or HfApi()
        check_upload(asked.push_to, asked.private, api)
    run.cfg.fabric.accelerator, run.cfg.kernels = "cpu", "auto"
    run.cfg.fabric.quantization = None  # adapters are merged into unquantized weights
    cfg = check_run(run)
    needed = cfg.needed_roles
    if asked.heads and not needed & set(CRITICS):
        raise ConfigError(
            "heads=true needs a run whose RL uses a reward or value head, and this run's uses neither; leave "
            "heads out"
        )
    if asked.heads and "value" in needed and LAYOUTS[cfg.roles.layout].trains_backbones:
        raise ConfigError(
            f"heads=true cannot be had with roles.layout={cfg.roles.layout}: the value head reads a model of "
            "its own, all of it trained, and export writes the policy alone; leave heads out"
        )
    opened, module = open_run(run, cfg)
    run.cfg.cache, run.cfg.algorithm = before
    dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
    with as_config_errors(f"to={asked.to}"), atomic_dir(folder, replaces=asked.overwrite) as partial:
        exported = export_policy(
            module.roles,
            opened.tokenizer,
            run.start,
            partial,
            dtype=dtype,
            with_heads=asked.heads,
            scorer=scorer,
        )
        (partial / "README.md").write_text(model_card(run, exported), encoding="utf-8")
        manifest = {
            "run": run.run_dir.resolve().name,
            "iteration": run.iteration,
            "layout": run.cfg.roles.layout,
            "base": str(run.start),
            **asdict(exported),
            "files": [*_files(partial)],
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if asked.push_to is not None and api is not None:
        message = f"Iteration {run.iteration} of {run.run_dir.resolve().name}"
        upload(folder, asked.push_to, asked.private, message, MANIFEST, api)
    return folder, exported


def _check_target(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise ConfigError(f"to={folder} exists already; give another folder, or overwrite=true")
    if not folder.exists():
        return
    other = "give another folder, or remove it yourself"
    try:
        manifest = read_json(folder / MANIFEST)
        written = {*manifest["files"], MANIFEST} if "run" in manifest else set()
    except (OSError, ValueError, TypeError, LookupError):
        written = set()
    require(
        bool(written),
        f"to={folder} must be an earlier export to be replaced, found no {MANIFEST} that lists its files; "
        f"{other}",
    )
    foreign = next((name for name in _files(folder) if name not in written), None)
    require(
        foreign is None,
        f"to={folder} has {foreign}, which no export wrote and overwrite=true would remove; {other}",
    )


def _files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all that a folder contains but folders."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def main() -> None:
    """Run the command line. A mistake of the user ends it in one line, before any work."""
    run_command(_parse, ("lit_rlkv.stages.export", "lit_rlkv.runs.open_run"), _export_and_show)


def _parse(arguments: Sequence[str]) -> ExportConfig:
    return parse(ExportConfig, compose_arguments("export", arguments)[0])


def _export_and_show(asked: ExportConfig) -> None:
    folder, exported = export(asked)
    console = Console(markup=False, emoji=False)
    console.print(f"merged model in {exported.dtype}, logits within {exported.logit_gap:.1e} of the policy's")
    if not exported.has_adapter:
        console.print("no adapter: this layout trains the whole backbone")
    if exported.critics and not exported.heads:
        console.print(f"no {' or '.join(exported.critics)} head written; heads=true writes it")
    console.print(f"written to {folder}", soft_wrap=True)
    if asked.push_to is not None:
        console.print(f"uploaded to {asked.push_to}", soft_wrap=True)


if __name__ == "__main__":
    main()

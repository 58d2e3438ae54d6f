"""The memory of a run: what it needs, said before any work, and the sizes that are chosen by it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import AUTO, ConfigError
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.advice import SETTINGS, explain_code_record
from lit_rlkv.planning.cards import Card, available_memory, own_card
from lit_rlkv.planning.models import pass_bytes_of, roles_of
from lit_rlkv.planning.needs import CACHE, RECORDS, rollout_needs
from lit_rlkv.planning.passes import MARGIN, Bytes, Passes
from lit_rlkv.planning.plan import Planner, Row
from lit_rlkv.reporting.progress import say
from lit_rlkv.rollout.decoder import FIRST_TOKENS
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import pretrained_path
from lit_rlkv.units import human_bytes

log = logging.getLogger(__name__)
FOR_CACHE, MAX_ROWS = 0.3, 512
"""Share of the memory beside the models for the cache of an evaluation, and most rows at a time there."""
ADAM = ("torch.optim.AdamW", "torch.optim.Adam")
"""Optimizers whose moments are surely as large as what they train."""


def check_memory(run: Run, start: str | Path | None) -> None:
    """Say what RL will need and what there is, and refuse a run that cannot fit; all ranks must call this.

    It is counted without weights. Refused is what surely exceeds the memory: weights, what their training
    adds, and what a rollout has at its beginning; that responses of full length may not fit is a warning.

    Args:
        start: the model that RL starts from; None: the SFT stage will make it.

    Raises:
        ConfigError: it does not fit.
    """
    path = pretrained_path(run.cfg.model.path, run.cfg.runs_dir) if start is None else str(start)
    cfg, card = replace(run.cfg, model=replace(run.cfg.model, path=path)), _card(run)
    try:
        roles = roles_of(cfg)
        counted = pass_bytes_of(cfg, roles, card)
        planner = Planner(cfg, roles, counted, card, max(run.sizes.prompts), run.fabric.world_size)
        row, needed = planner.row(planner.cache), [*_needed(run, planner, has_sft=start is None)]
    except Exception as error:  # of any model's own code; loaded, it says more of what is wrong
        log.info("memory is not planned: %s", error)
        return
    there = _least(run, card.memory if card.is_gpu else available_memory(_n_neighbours(run)))
    for what, needs in needed:
        if sum(needs.values()) > there:
            parts = [
                f"{human_bytes(n)} for the {part}" + f" (change {SETTINGS.get(part)})" * (part in SETTINGS)
                for part, n in needs.items()
            ]
            if sum(n for part, n in needs.items() if part in RECORDS) > there:  # no other setting helps
                advice = "lower rollout.n_prompts or rollout.max_new_tokens"
            else:
                otherwise = "take a smaller model, or more devices and fabric.strategy=fsdp2"
                advice = _advice(planner, row, otherwise)
            raise ConfigError(
                f"{what} needs at least {', '.join(parts)}, more than the {human_bytes(there)} of memory "
                f"here; {advice}"
            )
    if "rl" in cfg.stages and run.is_rank_zero:
        _say(run, planner, row)


def _advice(planner: Planner, row: Row, otherwise: str) -> str:
    """Return the settings with which more fits, or something else to do."""
    found = [f"set {each}" for each in planner.settings(row)]
    found += map(str, planner.changes(row))
    return "; ".join(found or [otherwise])


def _needed(run: Run, planner: Planner, *, has_sft: bool) -> Iterator[tuple[str, Bytes]]:
    """Yield what a run does and the bytes that it needs at least."""
    cfg, needs = run.cfg, dict(planner.model_bytes)
    if cfg.fabric.quantization is not None:  # bytes of a weight in 4 bits are an estimate
        needs["weights"] = int(needs["weights"] / (1 + MARGIN))
    if "sft" in cfg.stages and has_sft:
        names = planner.policy.named_parameters()
        n_bytes = sum(weight.nbytes for name, weight in names if "lora_" not in name)
        n_bytes //= planner.n_ranks if planner.is_sharded else 1
        has_adam = cfg.sft.optimizer._target_ in ADAM
        yield "the SFT stage", dict(zip(needs, (n_bytes, n_bytes, 2 * n_bytes * has_adam), strict=True))
    if "rl" in cfg.stages:
        yield "a rollout", {"weights": needs["weights"]} | _at_first(run, planner)
        yield "the update", needs if cfg.optimizer._target_ in ADAM else needs | {"optimizer": 0}


def _at_first(run: Run, planner: Planner) -> Bytes:
    """Return the bytes of cache and records as a rollout begins, and warn of a record that does not pay.

    Prompts count as the shortest, and a dense cache, which grows, as it is at first; so does any on a CPU,
    where memory is taken as it is written.
    """
    settings, cache, group = run.cfg.rollout, planner.cache, run.cfg.algorithm.group_size
    n_prompts = settings.n_prompts // (settings.n_shards or planner.n_ranks)
    shape, is_gpu = (n_prompts, min(run.sizes.prompts)), planner.card.is_gpu
    grows = cache.is_dense or not is_gpu
    most = min(FIRST_TOKENS if grows else settings.max_new_tokens, settings.max_new_tokens)

    def needs(cache: CacheSpec, n_tokens: int) -> Bytes:
        begun = replace(settings, max_new_tokens=n_tokens)
        return rollout_needs(planner.policy, cache, shape, begun, group, planner.dtype, is_gpu=is_gpu)

    with_codes, plain = (needs(one, settings.max_new_tokens) for one in (cache, replace(cache, dtype=None)))
    warning = explain_code_record(with_codes, plain, cache, settings, shape[1])
    if warning is not None and run.is_rank_zero:
        log.warning(warning)
    return {what: n for what, n in needs(cache, most).items() if what in (CACHE, *RECORDS)}


def _say(run: Run, planner: Planner, row: Row) -> None:
    """Say the peaks, and warn where responses of full length may not fit."""
    rollout, usable = planner.rollout_bytes(row.cache, planner.sizes[-1]), planner.card.usable
    host, there = planner.host_bytes * _n_neighbours(run) * planner.card.is_gpu, available_memory()
    usable = usable if planner.card.is_gpu else min(usable, there)
    peaks = (
        f"{phase} {human_bytes(sum(needs.values()))} (most: {max(needs, key=needs.__getitem__)})"
        for phase, needs in (("rollout", rollout), ("update", row.update))
    )
    run.predicted = f"{', '.join(peaks)}; usable {human_bytes(usable)}"
    if host:
        run.predicted += f"; records {human_bytes(host)} of {human_bytes(there)} left on the host"
    say(run.console, run.predicted, stage="memory")
    if max(sum(rollout.values()), sum(row.update.values())) > usable or host > there:
        advice = _advice(planner, row, "lower rollout.max_new_tokens")
        log.warning("responses of all %d tokens may not fit: %s", run.cfg.rollout.max_new_tokens, advice)


def passes_of(run: Run, models: Roles | PreTrainedModel) -> Passes:
    """Return the passes of the learner beside its models in memory, counted if one is to be chosen.

    Args:
        models: the roles, or the backbone that the SFT stage trains.
    """
    cfg, given = run.cfg, (run.cfg.fabric.tokens_per_pass, run.cfg.roles.gradient_checkpointing)
    n_prompt = max(run.sizes.prompts) + max(0, *(n - cfg.rollout.max_new_tokens for n in run.sizes.solutions))
    passes = Passes(
        cfg if isinstance(models, Roles) else replace(cfg, distillation=None),
        *(models, None, _card(run), n_prompt, run.fabric.world_size, run.pass_limit),
    )
    with run.fabric.autocast():
        return replace(passes, pass_bytes=PassBytes(passes.policy)) if AUTO in given else passes


def choose_checkpoints(run: Run, passes: Passes) -> Checkpoints:
    """Return `roles.gradient_checkpointing`, or the fastest that fits on all ranks, which call this."""
    chosen = passes.ways[run.ranks.all_reduce_max(passes.choose())]
    if len(passes.ways) > 1:
        log.info("roles.gradient_checkpointing=auto: %s", str(chosen).lower())
    return chosen


def tokens_per_pass(run: Run, passes: Passes, checkpoints: Checkpoints) -> int:
    """Return `fabric.tokens_per_pass`, or what fits on all ranks, which call this."""
    if run.cfg.fabric.tokens_per_pass != AUTO:
        return passes.most
    found = _least(run, passes.n_tokens(checkpoints))
    log.info("fabric.tokens_per_pass=auto: %d", found)
    return found


def evaluation_rows(run: Run, models: Roles | PreTrainedModel, caches: Sequence[CacheSpec]) -> int:
    """Return `evaluation.batch_size`, or the rows whose largest cache fits on all ranks, which call this."""
    given = run.cfg.evaluation.batch_size
    if given != AUTO:
        return int(given)
    passes = Passes(run.cfg, models, None, _card(run), 0, run.fabric.world_size)
    asked = (1, max(run.sizes.prompts)), run.cfg.rollout, 1
    needed = max(sum(rollout_needs(passes.policy, cache, *asked).values()) for cache in caches)
    found = _least(run, max(min(MAX_ROWS, int(FOR_CACHE * passes.room) // needed), 1))
    log.info("evaluation.batch_size=auto: %d", found)
    return found


def _least(run: Run, number: int) -> int:
    """Return the smallest of the ranks' numbers."""
    return -run.ranks.all_reduce_max(-number)


def _n_neighbours(run: Run) -> int:
    """Return the processes of the run on this machine."""
    n_nodes = getattr(run.fabric.strategy, "num_nodes", 1)  # a single process has no such number
    return max(run.fabric.world_size // n_nodes, 1)


def _card(run: Run) -> Card:
    """Return the device of this process, of a CPU its share, without a teacher's bytes."""
    card, distillation = own_card(run.fabric.device), run.parts.distillation
    teacher = distillation.teacher if isinstance(distillation, ModelDistillation) else None
    n_bytes = 0 if teacher is None else sum(weight.nbytes for weight in teacher.parameters())
    return replace(card, memory=card.memory // (1 if card.is_gpu else _n_neighbours(run)) - n_bytes)

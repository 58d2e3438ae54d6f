"""Peaks of memory that `python -m lit_rlkv.plan` predicts, beside measured ones.

    python benchmarks/plan_peaks.py [--fast] [--cases CASE ...] [--device cuda] [--parts] [--record]
    python benchmarks/plan_peaks.py --recorded            the table of the recorded rows
    python benchmarks/plan_peaks.py --gpu-rows            the peaks of benchmarks/results/gpu.jsonl

A case is a small random model and settings of fit, whose module, rollout data and training loop run two
iterations on random prompts, with responses that none ends. Measured is the most memory of the second one in
the rollout and in the update, above weights and the optimizer's moments: bytes of live tensors on a CPU,
without what kernels use inside, and of the allocator on CUDA, where models and lengths are larger. Predicted
are the parts of the plan without these two, as it counts now. The cases of a CPU take about ten minutes.

`--gpu-rows` measures nothing: the rollouts of rollout.py (whole peaks) and the learners of learner.py (above
the weights) were measured on an H100, and are predicted here.
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import command_line
import record
import torch
from hydra_parts.measure import Watch, make_meter, watched_gradients
from hydra_parts.setting import RandomWords, make_tokenizer
from lightning.fabric import Fabric
from pass_bytes import FAMILIES
from planned import config_of
from rollout_parts.setting import PRESETS
from text_table import text_table
from time_limit import TimeLimit
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from lit_rlkv.callbacks.hooks import loss_terms_of
from lit_rlkv.config import Config, build
from lit_rlkv.distributed.ranks import SINGLE_PROCESS
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.experience.score import critic_sees_shadow
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.planning.cards import find_card
from lit_rlkv.planning.models import pass_bytes_of, roles_of
from lit_rlkv.planning.plan import Planner
from lit_rlkv.rewards import RewardManager
from lit_rlkv.runs.launch import WEIGHT_DTYPES, fabric_precision
from lit_rlkv.runs.parts import Parts
from lit_rlkv.trainer import train

NAME = "plan_peaks"
PHASES = ("rollout", "update")
SETTINGS = (
    *("experiment=shadow", "algorithm=reinforce++_plain", "algorithm.group_size=1", "rollout.n_prompts=20"),
    *("algorithm.n_minibatches=1", "rollout.max_new_tokens=64", "roles.rank=8", "roles.alpha=16"),
    *("cache.policy=h2o", "cache.budget=32", "cache.interval=16", "cache.sink=4", "cache.window=8"),
    *("fabric.tokens_per_pass=800", "roles.gradient_checkpointing=false", "fabric.precision=32-true"),
)
LARGE = (
    *("rollout.max_new_tokens=1792", "fabric.tokens_per_pass=20480", "cache.budget=256"),
    *("cache.interval=64", "cache.window=16"),
)
"""For CUDA."""
PPO = (
    *("algorithm=ppo", "algorithm.critic_warmup=0", "algorithm.group_size=1", "reward.learned=1"),
    "reward.verifier=0",
)


@dataclass(frozen=True)
class Case:
    """Settings of fit, a shape, and the length of prompts."""

    family: str = "qwen3"
    settings: tuple[str, ...] = ()
    n_prompt: int = 16
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def on(self, device: str) -> "Case":
        """Return the case in the size of a device."""
        if device == "cpu":
            return self
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 32_768} | dict(self.sizes)
        return replace(self, settings=(*LARGE, *self.settings), n_prompt=16 * self.n_prompt, sizes=sizes)

    @property
    def config(self) -> PretrainedConfig:
        """The shape, of 512 tokens and three layers unless it says otherwise."""
        return FAMILIES[self.family](**{"vocab_size": 512, "num_hidden_layers": 3} | dict(self.sizes))


ALL, CHECKPOINTS = "roles=full", "roles.gradient_checkpointing=true"
DENSE, SIXTEEN = "cache.policy=dense", "fabric.precision=bf16-true"
WINDOWS = {"sliding_window": 48, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
LONG = ("rollout.n_prompts=4", "rollout.max_new_tokens=32", "fabric.tokens_per_pass=1056")
AT_ONCE = "algorithm.loss.separate_passes=false"
CASES = {
    "qwen3-lora": Case(),
    "qwen3-lora-checkpoints": Case(settings=(CHECKPOINTS,)),
    "qwen3-all": Case(settings=(ALL,)),
    "qwen3-all-checkpoints-bf16": Case(settings=(ALL, CHECKPOINTS, SIXTEEN)),
    "qwen3-all-mixed": Case(settings=(ALL, "fabric.precision=bf16-mixed")),
    "qwen3-distillation": Case(settings=("experiment=smd",)),
    "llama-lora-all-keys": Case("llama", (DENSE,)),
    "llama-lora-int8": Case("llama", ("cache.dtype=int8",)),
    "llama-lora-fp8-checkpoints": Case("llama", ("cache.dtype=fp8", CHECKPOINTS)),
    "llama-lora-int4-bf16": Case("llama", ("cache.dtype=int4", SIXTEEN)),
    "llama-long-prompts": Case("llama", LONG, 1024),
    "llama-all-long-prompts-snapkv": Case("llama", (*LONG, ALL, "cache.policy=snapkv"), 1024),
    "llama-top-p": Case("llama", ("rollout.top_p=0.95", "rollout.temperature=0.02"), 4, {"vocab_size": 8192}),
    "gemma3-lora": Case("gemma3", sizes=WINDOWS),
    "gemma3-lora-all-keys-checkpoints": Case("gemma3", (DENSE, CHECKPOINTS), sizes=WINDOWS),
    "moe-lora-checkpoints": Case("qwen3_moe", (CHECKPOINTS,)),
    "moe-all": Case("qwen3_moe", (ALL,)),
    "moe-lora-replayed-experts": Case("qwen3_moe", ("rollout.replay_routing=true",)),
    "linear-attention-lora": Case("qwen3_next", n_prompt=64, sizes={"num_hidden_layers": 4}),
    "ppo-all": Case(settings=(*PPO, "roles=full")),
    "ppo-lora": Case(settings=(*PPO, "roles=lora_ppo")),
    "ppo-lora-at-once": Case(settings=(*PPO, "roles=lora_ppo", AT_ONCE)),
    "ppo-dynamic-lora": Case(settings=(*PPO, "roles=dynamic_lora")),
    "ppo-hydra": Case(settings=(*PPO, "roles=hydra")),
    "ppo-hydra-at-once-checkpoints": Case(settings=(*PPO, "roles=hydra", AT_ONCE, CHECKPOINTS)),
    "ppo-joint": Case(settings=(*PPO, "roles=j_hydra")),
}
"""By name: family, what trains, and what differs from a cache of h2o and all activations kept."""
FAST = ("llama-lora-int8", "ppo-lora-at-once")


class Words(RandomWords):
    """Random words, whose score is always 0."""

    is_verifiable = True


def predicted(case: Case, device: str) -> tuple[Planner, dict[str, dict[str, int]]]:
    """Return the planner of a case, and the parts of both peaks without weights and moments."""
    with tempfile.TemporaryDirectory() as folder:
        planner = planner_of(case.config, folder, (*SETTINGS, *case.settings), case.n_prompt, device)
    found = parts_of(planner)
    return planner, {phase: without(parts, "weights", "optimizer") for phase, parts in found.items()}


def without(parts: Mapping[str, int], *names: str) -> dict[str, int]:
    return {what: n_bytes for what, n_bytes in parts.items() if what not in names}


def planner_of(
    config: PretrainedConfig, folder: str, settings: Sequence[str], n_prompt: int, device: str
) -> Planner:
    """Return the planner of settings of fit on this machine or a GPU."""
    config.save_pretrained(folder)
    cfg = config_of([*settings, f"model.path={folder}"])
    card, roles = replace(find_card(None), is_gpu=device == "cuda"), roles_of(cfg)
    return Planner(cfg, roles, pass_bytes_of(cfg, roles, card), card, n_prompt)


def parts_of(planner: Planner) -> dict[str, dict[str, int]]:
    """Return the parts of both peaks, with all responses and a full pass at a time."""
    n_rows = max(int(planner.cfg.fabric.tokens_per_pass) // planner.n_columns, 1)
    rollout = planner.rollout_bytes(planner.cache, planner.n_responses)
    return {"rollout": rollout, "update": planner.update_bytes(n_rows)}


def measured_peaks(case: Case, planner: Planner, device: str) -> dict[str, int]:
    """Return the peaks of the second iteration above weights and moments."""
    gc.collect()
    cfg, n_tokens = planner.cfg, int(case.config.vocab_size)
    parts = Parts(cfg)
    roles = real_roles(case.config, cfg, planner.roles.needed, device)
    options = {"replays": parts.correction.replays, "temperature": cfg.rollout.temperature}
    if "value" in roles.needed:
        options["value_shadow"] = critic_sees_shadow(cfg.roles, parts.correction, CacheSpec.of(cfg.cache))
    module = build(cfg.algorithm.loss)(roles, None, **options)
    module.make_optimizer = parts.optimizer
    run = SimpleNamespace(
        cfg=cfg,
        parts=parts,
        tokenizer=make_tokenizer(n_tokens),
        task=Words(case.n_prompt, n_tokens),
        rewards=RewardManager({}),
        environments=None,
        ranks=SINGLE_PROCESS,
    )
    with make_meter(module, device) as meter:
        watch = Watch(module, meter)
        callbacks = [watch] if parts.distillation is None else [watch, parts.distillation]
        module.loss_terms = loss_terms_of(callbacks)
        data = RolloutDataModule(run, module, callbacks, int(cfg.fabric.tokens_per_pass))
        fabric = Fabric(accelerator=device, devices=1, precision=fabric_precision(cfg.fabric.precision))
        with watched_gradients(module, watch.on_gradient):
            train(fabric, module, data, callbacks=callbacks, n_iterations=2, max_grad_norm=1.0)
    phases = {"rollout": "sampling", "update": "update"}
    return {phase: watch.held.phases[name].peak_bytes - watch.held.resident for phase, name in phases.items()}


def real_roles(config: PretrainedConfig, cfg: Config, needed: Sequence[str], device: str) -> Roles:
    """Return the roles of a config on random models."""

    def load(_: str) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        return prepare_backbone(model.to(WEIGHT_DTYPES[cfg.fabric.precision]).eval())

    head = {"linear.weight": torch.zeros(1, config.hidden_size), "linear.bias": torch.zeros(1)}
    settings = cfg.roles
    return Roles(
        settings.layout,
        load,
        lora=LoraSpec(settings.rank, settings.alpha, settings.target_modules),
        needed=needed,
        reward_head=head,
        checkpoints_layers=settings.gradient_checkpointing,
    )


def gpu_rows() -> Iterator[dict[str, Any]]:
    """Yield case, phase, predicted and measured bytes of the peaks that a GPU run has recorded."""
    rows = map(json.loads, (record.RESULTS / "gpu.jsonl").read_text().splitlines())
    for row in rows:
        if row["record"] == "rollout" and row.get("peak_mib") and not row["integrated"]:
            shape, n_rows = PRESETS[row["preset"]], row["batch"]
            settings = [f"rollout.n_prompts={n_rows}", f"rollout.max_new_tokens={row['new']}"]
            settings += [f"cache.policy={row['policy']}", f"cache.budget={row['budget']}"]
            settings += [f"cache.interval={shape.interval}", f"cache.window={shape.window}"]
            config = Qwen2Config(**shape.shape, pad_token_id=0)
            parts = gpu_parts(config, settings, shape.prompt)["rollout"]
            name = f"rollout of {row['preset']}, {n_rows} x {row['new']:,} tokens, {row['cache']}, whole"
            compiled = ", compiled layers" if row["compile_layers"] else ""
            yield {"case": name + compiled, "phase": "rollout", "predicted": sum(parts.values())} | {
                "measured": round(row["peak_mib"] * 2**20)
            }
        elif row["record"] == "learner" and "arms" in row:
            asked = row["asked"]
            settings = [f"rollout.max_new_tokens={asked['tokens'] - asked['prompt']}"]
            settings += [f"fabric.tokens_per_pass={asked['tokens']}"]
            parts = gpu_parts(Qwen3Config(**asked["sizes"]), settings, asked["prompt"])["update"]
            n_bytes = sum(without(parts, "weights").values())
            for arm in row["arms"]:
                name = f"learner, {asked['tokens']:,} tokens, all weights, {arm['name']}"
                yield {"case": name, "phase": "update", "predicted": n_bytes, "measured": arm["peak_bytes"]}


def gpu_parts(config: PretrainedConfig, settings: list[str], n_prompt: int) -> dict[str, dict[str, int]]:
    """Return the parts of the peaks of a model without an optimizer, in 16 bit on a GPU."""
    config.max_position_embeddings = 2**20
    with tempfile.TemporaryDirectory() as folder:
        planner = planner_of(config, folder, (*SETTINGS, ALL, SIXTEEN, *settings), n_prompt, "cuda")
    return {phase: without(found, "optimizer") for phase, found in parts_of(planner).items()}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        [row["case"], row["phase"]]
        + [f"{row[name] / 1e6:,.1f}" for name in ("predicted", "measured")]
        + [f"{row['predicted'] / row['measured']:.2f}"]
        for row in rows
    ]
    print(text_table(["case", "phase", "predicted MB", "measured MB", "ratio"], cells, n_left=2))


def compared(rows: Sequence[Mapping[str, Any]], *, shows_parts: bool = False) -> Iterator[dict[str, Any]]:
    """Yield measured rows with what the plan predicts now; each case's rows follow each other."""
    found: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
    for row in rows:
        name, device, phase = row["case"], row["device_type"], row["phase"]
        if (name, device) not in found:
            found[name, device] = predicted(CASES[name].on(device), device)[1]
        parts = found[name, device][phase]
        if shows_parts:
            print(f"{name}, {phase}:", ", ".join(f"{what} {n / 1e6:,.2f}" for what, n in parts.items()))
        yield {**row, "predicted": sum(parts.values())}


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    command_line.add_device_option(parser)
    command_line.add_restart_options(parser)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--fast", action="store_true", help="two cases")
    parser.add_argument("--parts", action="store_true", help="print the parts of each prediction, too")
    parser.add_argument("--recorded", action="store_true", help="measure nothing; compare the recorded rows")
    parser.add_argument("--gpu-rows", action="store_true", help="measure nothing; predict gpu.jsonl")
    args: argparse.Namespace = command_line.complete(parser.parse_args())
    if args.gpu_rows:
        print_table([*gpu_rows()])
        return
    limit = TimeLimit(args.minutes)
    for name in () if args.recorded else FAST if args.fast else args.cases:
        asked = {"case": name, "device_type": args.device}
        if limit.is_over or (not args.again and record.find(NAME, **asked)):
            continue
        case = CASES[name].on(args.device)
        planner, _ = predicted(case, args.device)
        for phase, n_bytes in measured_peaks(case, planner, args.device).items():
            record.append(NAME, {**asked, "phase": phase, "measured": n_bytes})
    print_table([*compared(latest(), shows_parts=args.parts)])


def latest() -> list[dict[str, Any]]:
    """Return the last row of each case, device and phase, in the order of the cases."""
    rows = {(row["device_type"], row["case"], row["phase"]): row for row in record.rows(NAME)}
    order = [*CASES]
    return sorted(rows.values(), key=lambda row: (row["device_type"], order.index(row["case"]), row["phase"]))


if __name__ == "__main__":
    main()

"""Load the backbones of a run, shard them, and build the roles and the RL module."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError, as_config_errors, build
from lit_rlkv.data.tokenizers import check_vocabulary
from lit_rlkv.data.validation import check_prompts_fit
from lit_rlkv.distributed.sharding import ShardedLayers, ShardedStrategy
from lit_rlkv.evaluation.perplexity import check_texts_fit
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.score import critic_sees_shadow
from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kernels.quantization import check_dim
from lit_rlkv.kvcache import SlotCache
from lit_rlkv.models.activations import checkpointed_layers
from lit_rlkv.models.adapters import LoraSpec, check_target_modules
from lit_rlkv.models.backbone import (
    dense_states,
    head_dims,
    layer_kinds,
    n_embeddings,
    rope_frequencies,
)
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.kv_scorer import add_kv_scorer, kv_scorer_of, read_kv_scorer
from lit_rlkv.models.layouts import CRITICS, LAYOUTS
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.models.loading import load_causal_lm
from lit_rlkv.models.output_projection import output_projections
from lit_rlkv.models.preparation import check_chunks, prepare_backbone
from lit_rlkv.models.routing import routers_of
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.modules.evictions import EvictionLearner
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.launch import WEIGHT_DTYPES
from lit_rlkv.runs.preflight import CheckedConfig, check_critics
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import critic_dir, load_reward_head

log = logging.getLogger(__name__)


def load_backbone(run: Run, path: str | Path | None) -> PreTrainedModel:
    """Load a backbone from a path or hub name, or build the preset, and prove that it can be replayed.

    It is on the run's device, or on the CPU if it will be sharded. Weights have the run's precision, float32
    under mixed precision, whatever the checkpoint has.
    """
    with as_config_errors("model"):
        backbone = _load_backbone(run, path, WEIGHT_DTYPES[run.cfg.fabric.precision])
    roles = run.cfg.roles
    if not LAYOUTS[roles.layout].trains_backbones:
        with as_config_errors("roles"):
            check_target_modules(backbone, roles.target_modules)
    return backbone


def _load_backbone(run: Run, path: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    quantization = None if path is None else run.cfg.fabric.quantization
    if path is not None:
        model = load_causal_lm(path, dtype, quantization=quantization, device=run.fabric.device)
    else:
        torch.manual_seed(derive_seed(run.cfg.sft.seed, "init"))
        tokenizer = run.tokenizer
        preset = run.cfg.model.preset
        assert preset is not None, "parse_config has checked that"
        model = build(preset)(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        for parameter in model.parameters():  # buffers, such as rotary frequencies, are as they are
            parameter.data = parameter.data.to(dtype)
    # What is quantized is where it was loaded to, and what will be sharded need not fit there.
    if quantization is None and not run.is_sharded:
        with explain_out_of_memory(
            lambda: (
                f"out of memory while {path or 'the model'} moves to {run.fabric.device}; shard it over "
                "several devices (fabric.strategy=fsdp2, of lit_rlkv.fit), or store less of it "
                "(fabric.precision=bf16-true, fabric.quantization=4bit)"
            )
        ):
            run.fabric.to_device(model)
    check_vocabulary(run.tokenizer, n_embeddings(model))
    check_prompts_fit(model, run.sizes, run.cfg.rollout.max_new_tokens)
    if run.texts is not None:
        check_texts_fit(model, run.texts)
    with use_kernels("reference") if run.is_sharded else nullcontext():
        backbone = prepare_backbone(model.eval())
        if run.cfg.rollout.replay_routing:
            routers_of(backbone)
        if run.cfg.rollout.prefill_chunk is not None:
            check_chunks(backbone)
        for dim in head_dims(backbone):
            check_dim(dim, run.parts.cache.dtype)
        check_budget_profile(run.cfg, backbone)
        check_eviction_policy(run, backbone)
        return backbone


def check_eviction_policy(run: Run, backbone: PreTrainedModel) -> None:
    """Check that the model has what the cache's policy reads of it; a trained one's scorer comes later.

    Raises:
        ValueError: it has not, or it will be sharded.
    """
    cache, kinds = run.parts.cache, layer_kinds(backbone)
    if not cache.is_trained:
        SlotCache(
            cache,
            len(kinds),
            n_rows=1,
            seq_len=1,
            device=backbone.device,
            kinds=kinds,
            frequencies=rope_frequencies(backbone),
            projections=() if run.is_sharded else output_projections(backbone),
        )


def check_budget_profile(cfg: CheckedConfig, backbone: PreTrainedModel) -> None:
    """Check that the cache's budget profile is of this model's layers, at every budget of the run.

    Raises:
        ValueError: it is not, or leaves a layer too few keys.
    """
    cache = cfg.parts.cache
    if cache.budget_profile is None:
        return
    budgets = {cache.budget, *cfg.evaluation.budgets}
    if cfg.cache.target_overlap is not None:
        budgets |= {*BudgetController(cache, cfg.cache.target_overlap, cfg.cache.budget_bounds).bounds}
    n_layers = sum(kind.in_profile for kind in layer_kinds(backbone))
    for budget in sorted(budgets):
        replace(cache, budget=budget).layer_budgets(n_layers)


def shard(run: Run, backbone: PreTrainedModel) -> None:
    """Shard a backbone with its adapters over the ranks; do nothing if the run shards nothing.

    Raises:
        ConfigError: a forward of it does not go through layers of transformers' own kind, once each.
    """
    strategy = run.fabric.strategy
    if not isinstance(strategy, ShardedStrategy):
        return
    layers = layers_in_order(backbone)
    within = {one for layer in layers for one in layer.modules() if one is not layer}
    if not layers or len({*layers}) < len(layers) or within & {*layers}:
        raise ConfigError(
            f"fabric.strategy=fsdp2 shards a model layer by layer, and {type(backbone).__name__} does not go "
            "through layers once each; use fabric.strategy=ddp"
        )
    ShardedLayers(
        backbone,
        model_body(backbone),
        layers,
        strategy.device_mesh["data_parallel"],
        run.fabric.device,
        computes_in=torch.bfloat16 if run.cfg.fabric.precision == "bf16-mixed" else None,
        keeps_whole=strategy.keeps_whole,
    )


@torch.no_grad()
def layers_in_order(backbone: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that a forward of text calls, in order; vision layers are not among them."""
    called: list[nn.Module] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        called.append(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in checkpointed_layers(backbone)]
    try:
        with use_kernels("reference"):
            dense_states(backbone, torch.zeros((1, 2), dtype=torch.long, device=backbone.device))
    finally:
        for hook in hooks:
            hook.remove()
    return called


def make_roles(run: Run, start: str | Path) -> Roles:
    """Build the backbones, adapters and heads of the layout from one starting model.

    Raises:
        ConfigError: the starting model lacks what the layout and the algorithm need.
    """
    cfg, settings = run.cfg, run.cfg.roles
    critic = critic_dir(start)
    reward_head = load_reward_head(critic)
    check_critics(cfg, str(start), has_head=reward_head is not None, is_apart=critic != start)

    def load(role: str) -> PreTrainedModel:
        backbone = load_backbone(run, critic if role in CRITICS else start)
        torch.manual_seed(derive_seed(cfg.seed, "lora"))  # the adapters come next, whatever loading drew
        return backbone

    targets, given = settings.target_modules, settings.gradient_checkpointing
    modules = targets if isinstance(targets, str) else list(targets)
    with as_config_errors("roles"):
        roles = Roles(
            settings.layout,
            load,
            lora=LoraSpec(settings.rank, settings.alpha, modules),
            needed=cfg.needed_roles,
            reward_head=reward_head,
            value_head=reward_head if settings.value_init == "reward" else None,
            checkpoints_layers=False if given == "auto" else given,  # `choose_checkpoints` sees all in memory
        )
    if cfg.parts.cache.is_trained:
        add_scorer(cfg, roles, start)
    for name in roles.backbones:
        shard(run, roles.named_backbone(name))
    roles.heads.to(run.fabric.device)
    return roles


def add_scorer(cfg: CheckedConfig, roles: Roles, start: str | Path) -> None:
    """Add the scorer of the cache's policy to the backbone: that of the starting model, or a new one."""
    scorer = make_scorer(cfg, roles.backbone("policy"), start)
    scorer.requires_grad_(cfg.algorithm.eviction.weight > 0)


def make_scorer(cfg: CheckedConfig, backbone: PreTrainedModel, start: str | Path | None) -> nn.Module:
    """Add a scorer to a backbone, with the weights in the folder `start` if it has some, and return it."""
    policy = cfg.parts.cache.make_policy()
    assert policy is not None
    torch.manual_seed(derive_seed(cfg.seed, "kv_scorer"))
    with as_config_errors("cache"):
        weights = None if start is None else read_kv_scorer(start)
        scorer = add_kv_scorer(backbone, policy, weights)
    log.info("scorer of evictions: %s", "new" if weights is None else f"from {start}")
    return scorer


def make_policy(run: Run, start: str | Path) -> PolicyModule:
    """Build the RL module of the algorithm with its roles."""
    cfg, algorithm = run.cfg, run.cfg.algorithm
    n_steps = algorithm.n_iterations * algorithm.n_epochs * algorithm.n_minibatches
    # Only a KL in the loss has an estimator there; one in the reward may be k1, which has no gradient.
    kl = algorithm.kl
    in_loss = {"kl_estimator": kl.estimator} if kl.place == "loss" else {}
    parts = cfg.parts
    sees_shadow = critic_sees_shadow(cfg.roles, parts.correction, parts.cache)
    critic = {"value_shadow": sees_shadow} if parts.has_critic else {}
    roles = make_roles(run, start)
    scorer, eviction = kv_scorer_of(roles.backbone("policy")), algorithm.eviction
    evictions = None
    if scorer is not None and eviction.weight > 0:
        evictions = EvictionLearner(
            parts.cache, scorer, weight=eviction.weight, clip=eviction.clip, kl_coef=eviction.kl_coef
        )
    with as_config_errors("algorithm.loss"):
        return parts.module(
            roles,
            parts.optimizer,
            replays=parts.correction.replays,
            temperature=cfg.rollout.temperature,
            kl_bias_correction=kl.bias_correction,
            entropy_coef=algorithm.entropy_coef,
            policy_weight=algorithm.policy_weight,
            evictions=evictions,
            eviction_lr_scale=eviction.lr_scale,
            n_warmup_steps=algorithm.n_warmup_steps,
            n_decay_steps=n_steps if algorithm.lr_schedule == "linear" else None,
            **in_loss,
            **critic,
        )

"""Every key of `python -m lit_rlkv.fit`: type, default, range and meaning, a dataclass per config group.

`--help` and docs/reference/config.md are generated from here. Keys of a node with `_target_` are the
arguments of the class that it names.
"""

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import MAX_TEMPERATURE, MIN_TEMPERATURE, Number, check_temperature
from lit_rlkv.config.errors import as_config_errors, require
from lit_rlkv.config.options import Node, chosen, group, option

Stage = Literal["sft", "rl", "eval"]
Kernels = Literal["auto", "reference", "triton"]
Precision = Literal["32-true", "64-true", "bf16-true", "16-mixed", "bf16-mixed"]
MAX_SEED = 2**32 - 1
"""Largest seed, as in Lightning."""
MAX_PROCESSES = 1024
"""Most processes or threads of a machine."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model: a checkpoint, or a preset that starts from random weights."""

    path: str | None = option(
        None, "checkpoint folder, GGUF file or hub name, with its own tokenizer; null: the preset"
    )
    preset: Node | None = chosen(
        "function that builds a model from scratch, such as lit_rlkv.models.presets.*"
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache of rollouts, per sequence, layer and KV head, and what steers its budget."""

    policy: str = option(
        "random",
        "streaming h2o snapkv rkv tova knorm keydiff expected vase gkv random learned dense, or "
        "mypackage.policies.MyPolicy",
    )
    policy_options: Node = option({}, "arguments of the policy's constructor")
    budget: int = option(16, "keys that survive a compaction", least=1)
    interval: int = option(5, "tokens written between compactions", least=1)
    sink: int = option(1, "first tokens, never evicted", least=0)
    window: int = option(3, "last tokens, never evicted, and the queries that policies look at", least=1)
    protect_prompt: bool = option(
        False, "never evict keys of the prompt, and count only those after it in the budget"
    )
    budget_profile: Literal["pyramid"] | tuple[int, ...] | None = option(
        None,
        "budgets by layer, with budget as their mean: pyramid gives lower layers more (arXiv:2406.02069), a "
        "number for each layer without a window gives them in proportion; null: all the same",
        least=1,
    )
    dtype: Literal["int8", "fp8", "int4"] | None = option(
        None,
        "int8, fp8 or int4: quantizes keys and values as they arrive, which the learner replays; null: they "
        "stay in the model's dtype",
    )
    target_overlap: Number | None = option(
        None,
        "steer the budget so that the lowest kv/overlap_p05 of any position stays here, 0.86 for example, "
        "from measurement to measurement of diagnostics.mismatch; null: a fixed budget",
        above=0,
        below=1,
    )
    budget_bounds: tuple[int, ...] | None = option(
        None, "smallest and largest budget under target_overlap; null: half and twice budget", least=1
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling and scoring of responses."""

    n_prompts: int = option(32, "prompts per iteration, each with algorithm.group_size responses", least=1)
    max_new_tokens: int = option(24, "longest response, in tokens", least=1)
    temperature: Number = option(
        1.0, "divides the logits before sampling", least=MIN_TEMPERATURE, most=MAX_TEMPERATURE
    )
    top_k: int | None = option(None, "sample from so many likeliest tokens; null: from all", least=1)
    top_p: Number = option(
        1.0, "then from the fewest likeliest tokens with this probability; 1: all", above=0, most=1
    )
    min_p: Number | None = option(
        None, "then from tokens with this part of the highest probability; null: all", least=0, below=1
    )
    max_rows: int | None = option(
        None, "most responses sampled at a time, which bounds the cache; null: all", least=1
    )
    prefill_chunk: int | None = option(
        None,
        "most tokens of a prompt in one forward, which bounds the memory of prefill; after each chunk the "
        "cache is compacted to its budget; null: each prompt in one piece",
        least=1,
    )
    max_turns: int = option(8, "most turns of a response; only with an environment", least=1)
    max_observation_tokens: int = option(
        256, "most tokens of an observation, whose text is cut; max_new_tokens counts them too", least=1
    )
    environment_timeout_s: Number | None = option(
        10.0,
        "time limit of a reset or step, after which the response has failed; null: none, and they are "
        "called one after another, so that a rollout depends on the seed alone",
        above=0,
        most=86_400,
    )
    environment_workers: int = option(64, "environments that are called at a time", least=1, most=4096)
    n_shards: int | None = option(
        None,
        "parts of the prompts with random numbers of their own; fixed, a run is the same on 1 to n_shards "
        "processes; null: one per process",
        least=1,
    )
    cuda_graph: bool | None = option(
        None, "capture the decode step as a CUDA graph; null: on CUDA, if the model can be captured"
    )
    n_splits: int | None = option(
        None,
        "parts of a row's cache that the decode attention kernel reads in parallel, as num_splits of "
        "FlashAttention; a number keeps its rounding the same in any batch; null: more for fewer rows",
        least=1,
        most=128,
    )
    compile_layers: bool = option(
        False,
        "fuse the decoder layers of decode steps by torch.compile; compiling takes seconds per layer, again "
        "for another number of rows",
    )
    replay_routing: bool = option(
        False,
        "policy, reference and critic take the experts that the sampler's routers chose for each token (R3, "
        "rollout routing replay); refused for a model without top-k routers",
    )


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL divergence to the reference, under the learner's own view."""

    weight: Number = option(0.0, "coefficient; 0 leaves this KL out", least=0)
    place: Literal["loss", "reward"] = option(
        "loss", "a loss term with a gradient, or a penalty on the reward of each token"
    )
    estimator: Literal["k1", "k2", "k3"] = option("k3", "of the KL per token; k1 only in the reward")
    bias_correction: bool = option(
        False, "multiply k3 in the loss by π/π_old: its gradient is then that of the KL (arXiv:2512.02556)"
    )
    target: Number | None = option(
        None, "nats per response that the weight is steered to (arXiv:1909.08593); null: it is fixed", above=0
    )
    horizon: Number = option(10_000.0, "responses over which the weight is steered", above=0)

    def __post_init__(self) -> None:
        require(
            self.estimator != "k1" or self.place == "reward",
            "algorithm.kl.estimator=k1 has no useful gradient, so it does not serve in the loss; use k2 or "
            "k3, or algorithm.kl.place=reward",
        )
        require(
            not self.bias_correction or (self.place, self.estimator) == ("loss", "k3"),
            f"algorithm.kl.bias_correction=true corrects k3 in the loss, got algorithm.kl.place={self.place} "
            f"and algorithm.kl.estimator={self.estimator}; use loss and k3, or bias_correction=false",
        )
        require(
            self.target is None or self.weight > 0,
            f"algorithm.kl.target={self.target} steers algorithm.kl.weight, which must be above 0, got "
            f"{self.weight}; raise it, or use algorithm.kl.target=null",
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceSyncConfig:
    """A reference that follows the policy; each needs a whole backbone of its own (arXiv:2404.09656)."""

    every: int | None = option(
        None,
        "iterations after which the reference becomes alpha · policy + (1 − alpha) · reference, with "
        "roles=full or roles=ppo; null: it stays the starting model",
        least=1,
    )
    alpha: Number = option(0.6, "share of the policy in the new reference", above=0, most=1)


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Problems of a dataset drawn by success rates p, with weights p (1 − p) + floor (arXiv:2504.03380)."""

    decay: Number | None = option(
        None,
        "draw by success rates, and keep this share of a problem's old rate in the new one, 0: none of it; "
        "null: problems come epoch by epoch. Success is the score that reward.accuracy names, from 0 to 1",
        least=0,
        below=1,
    )
    floor: Number = option(0.05, "of the weights, so that problems never or always solved return", above=0)


@dataclass(frozen=True, kw_only=True)
class EvictionConfig:
    """Evictions as actions of a policy with parameters, trained beside the tokens; cache.policy=learned."""

    weight: Number = option(
        1.0, "weight of the policy gradient of the evictions; 0: the scorer stays as it is", least=0
    )
    lr_scale: Number = option(30.0, "learning rate of the scorer, relative to the policy's", above=0)
    clip: Number = option(0.2, "bound of the change of each decision's probability ratio", above=0, below=1)
    kl_coef: Number = option(
        0.0, "coefficient of the KL of the first draw to a uniform one; 0: none", least=0
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Keys that all algorithms share."""

    group_size: int = option(8, "responses to each prompt", least=1)
    n_iterations: int = option(130, "iterations: a rollout and the updates on it", least=1)
    resample: int = option(
        0,
        "most further rounds of prompts in an iteration, whose groups replace those of equal rewards in the "
        "same shard",
        least=0,
    )
    curriculum: CurriculumConfig = group(CurriculumConfig)
    n_epochs: int = option(1, "passes over each rollout", least=1)
    n_minibatches: int = option(2, "optimizer steps per pass", least=1)
    critic_warmup: int = option(0, "first iterations, in which the critic alone learns", least=0)
    mask_truncated: bool = option(
        False,
        "leave responses cut at max_new_tokens out of the policy's loss, but not out of their number",
    )
    max_grad_norm: Number | None = option(
        1.0, "norm that gradients are clipped to; null: not clipped", above=0
    )
    policy_weight: Number = option(
        1.0, "weight of the algorithm's own loss; 0 trains by distillation alone", least=0
    )
    entropy_coef: Number = option(
        0.0, "weight of an entropy bonus, over the tokens and by the mean of the loss; 0: none", least=0
    )
    n_warmup_steps: int = option(0, "first optimizer steps, in which the learning rate rises", least=0)
    lr_schedule: Literal["linear", "constant"] = option("linear", "linear falls to 0 at the last iteration")
    kl: KLConfig = group(KLConfig)
    reference_sync: ReferenceSyncConfig = group(ReferenceSyncConfig)
    eviction: EvictionConfig = group(EvictionConfig)
    aggregation: Literal["token", "sequence", "constant"] = option(
        "token", "how token losses become one: mean of tokens, of responses, or over a constant length"
    )
    advantage: Node = chosen(
        "advantage estimator: GroupAdvantage, GAEAdvantage, ReturnAdvantage, PairAdvantage, or your own"
    )
    loss: Node = chosen(
        "LightningModule with the policy's loss: GRPO, CISPO, Reinforce, PPO, OnlineDPO, or your own"
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Components, weights and normalisation of the reward of a response."""

    verifier: Number = option(0.0, "weight of the task's score, which is always logged", least=0)
    learned: Number = option(0.0, "weight of the reward role's score; 0 leaves the role out", least=0)
    environment: Number = option(
        0.0, "weight of the environment's reward, the sum over the turns, which is always logged", least=0
    )
    functions: Node = option({}, "more scores by name, each a _target_ of lit_rlkv.rewards with a weight")
    accuracy: str | None = option(
        None,
        "the function that evaluations count right answers by, or `environment`; null: the environment where "
        "only it has a weight, else the task's own score, or without answers the only rewarded function",
    )
    max_failed: Number = option(
        0.5, "share of an iteration's responses whose reward may fail before the run ends", least=0, most=1
    )
    normalize: Literal["none", "batch", "running"] = option(
        "none", "batch: mean 0, std 1 over the iteration; running: over all rewards so far"
    )
    clip: Number | None = option(None, "bound on the size of the normalised reward; null: none", above=0)
    missing_eos_penalty: Number = option(
        0.0, "taken off a response that was cut at rollout.max_new_tokens", least=0
    )
    overlong_buffer: int | None = option(
        None,
        "last tokens before rollout.max_new_tokens in which overlong_penalty rises from 0; null: no penalty",
        least=1,
    )
    overlong_penalty: Number = option(
        1.0, "taken off a response of rollout.max_new_tokens under overlong_buffer", least=0
    )


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """Policy, reference, reward model and critic on one backbone or several (arXiv:2309.00754)."""

    layout: Literal["ppo", "lora_ppo", "dynamic_lora", "j_hydra", "hydra"] = option(
        "hydra", "which roles share a backbone or train an adapter; roles=full trains all weights"
    )
    rank: int = option(32, "rank of the LoRA adapters", least=1)
    alpha: int = option(64, "scale of the LoRA adapters, divided by rank", least=1)
    target_modules: str | tuple[str, ...] = option("all-linear", "adapted modules, or a list of their names")
    value_init: Literal["zero", "reward"] = option(
        "zero", "reward: the critic's head starts from the reward head"
    )
    value_view: Literal["shadow", "dense"] = option(
        "shadow", "keys that the critic sees: those that the sampler saw, or all"
    )
    gradient_checkpointing: bool = option(
        False, "recompute layers in the backward pass: less memory, one more forward"
    )
    stack_passes: bool = option(False, "score reference, reward and value as one batch")


@dataclass(frozen=True, kw_only=True)
class OnPolicyPairsConfig:
    """One more SFT pass, on pairs against wrong answers of the model itself under the run's cache."""

    n_prompts: int = option(
        0, "prompts that the model answers, at rollout.temperature; 0: no such pass", least=0
    )
    n_steps: int = option(300, "optimizer steps of this pass", least=1)
    reward_weight: Number = option(1.0, "weight of the ranking loss in this pass", above=0)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Hydra-SFT: worked solutions for the LM head, preference pairs for the reward head."""

    joint: bool = option(
        True, "both heads on one backbone; false trains a reward model of its own, from the finished LM"
    )
    n_steps: int = option(800, "optimizer steps", least=1)
    reward_steps: int = option(
        800, "optimizer steps of a reward model of its own", least=1, yaml="${.n_steps}"
    )
    n_warmup_steps: int = option(30, "first steps, in which the learning rate rises", least=0)
    batch_size: int = option(64, "worked solutions in a batch", least=1)
    n_pairs: int = option(
        16, "rows of each batch that also bring a rejected completion; 0: the LM head alone", least=0
    )
    reward_weight: Number = option(
        0.1, "weight of the ranking loss beside the LM loss; 0: the LM head alone", least=0
    )
    on_policy_pairs: OnPolicyPairsConfig = group(OnPolicyPairsConfig)
    steps_per_iteration: int = option(50, "steps between two checkpoints and log rows", least=1)
    max_grad_norm: Number | None = option(
        1.0, "norm that gradients are clipped to; null: not clipped", above=0
    )
    seed: int = option(0, "seed of the data and the initial weights", yaml="${seed}", least=0, most=MAX_SEED)
    optimizer: Node = option(
        {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 2e-3, "betas": [0.9, 0.98]}
        | {"weight_decay": 0.01},
        "of the SFT stage: any of torch.optim with its arguments",
    )

    @property
    def trains_reward_head(self) -> bool:
        """True if the stage trains a reward head."""
        on_task_pairs = self.n_pairs > 0 and (self.reward_weight > 0 or not self.joint)
        return on_task_pairs or self.on_policy_pairs.n_prompts > 0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Accuracy on held-out prompts, dense and for each budget, before and after training."""

    n_prompts: int = option(512, "held-out prompts, which training never sees", least=1)
    temperature: Number = option(
        0.0, "of the responses that are scored; 0: greedy", least=0, most=MAX_TEMPERATURE
    )
    top_k: int | None = option(None, "of the responses that are scored, as rollout.top_k", least=1)
    top_p: Number = option(1.0, "of the responses that are scored, as rollout.top_p", above=0, most=1)
    min_p: Number | None = option(
        None, "of the responses that are scored, as rollout.min_p", least=0, below=1
    )
    n_mismatch: int = option(
        128,
        "prompts also sampled as in rollouts, for KL(μ‖dense policy) and the replay gap",
        least=1,
    )
    budgets: tuple[int, ...] = option(
        (10, 12, 14), "budgets to evaluate beside dense and cache.budget, in keys", least=1
    )
    batch_size: Literal["auto"] | int = option(
        "auto",
        "most responses sampled at a time; auto: up to 512, as many as memory holds. Another number draws "
        "other random responses and evictions",
        least=1,
    )

    def __post_init__(self) -> None:
        with as_config_errors("evaluation"):
            check_temperature("temperature", self.temperature, is_greedy_allowed=True)


@dataclass(frozen=True, kw_only=True)
class FabricConfig:
    """Devices, processes and precision, for Lightning Fabric."""

    accelerator: str = option("auto", "as in Lightning: auto, cpu, cuda, ...")
    devices: Literal["auto"] | int = option(
        "auto",
        "processes on this machine; -1: every device; auto: one, or those that a launcher has started",
        least=-1,
        most=MAX_PROCESSES,
    )
    num_nodes: int = option(1, "machines; only a launcher starts processes on others", least=1)
    strategy: Literal["auto", "ddp", "fsdp2"] = option(
        "auto", "auto: ddp for several processes; fsdp2 shards the layers of large backbones over them"
    )
    unshard_rollout: bool = option(False, "with fsdp2: gather all layers while sampling and scoring")
    precision: Precision = option("32-true", "of weights and computation, as in Lightning")
    quantization: Literal["4bit"] | None = option(
        None, "4bit: the backbone's weights in NF4 under adapters; needs CUDA and the extra `quant`"
    )
    n_threads: int | None = option(
        None, "CPU threads of each process; null: as torch chooses", least=1, most=MAX_PROCESSES
    )
    tokens_per_pass: Literal["auto"] | int = option(
        "auto",
        "most tokens in a pass of SFT, scoring and update, padding included: less memory, the same gradient; "
        "auto: up to 16384, as many as memory holds",
        least=1,
    )

    def __post_init__(self) -> None:
        devices = self.devices
        require(
            devices == "auto" or devices == -1 or devices >= 1,
            f"fabric.devices must be auto, -1 or at least 1, got {devices}; -1 takes every GPU",
        )
        require(
            not self.unshard_rollout or self.strategy == "fsdp2",
            f"fabric.unshard_rollout=true, but fabric.strategy={self.strategy} shards nothing; drop one",
        )


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """Checkpoints and samples."""

    checkpoint_every: int = option(1, "iterations between checkpoints; the last is always saved", least=1)
    keep_last: int = option(2, "newest checkpoints to keep; resume takes the newest whole one", least=1)
    keep_best: int = option(0, "more checkpoints to keep, the best by best_metric", least=0)
    best_metric: str = option("reward", "any metric of metrics.csv")
    best_mode: Literal["max", "min"] = option("max", "which values of best_metric are best")
    samples_every: int = option(20, "iterations between printed samples", least=1)
    n_samples: int = option(4, "responses shown each time", least=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    seed: int = option(0, "seed of every random number", least=0, most=MAX_SEED)
    kernels: Kernels = option("auto", "auto: Triton on CUDA, plain PyTorch elsewhere")
    stages: tuple[Stage, ...] = option(("sft", "rl", "eval"), "stages of the run: sft, rl, eval")
    resume: str | None = option(None, "folder of an interrupted run, or auto: the newest run of this config")
    runs_dir: str = option("runs", "folder of run folders and of the SFT models that runs share")
    trusted_modules: tuple[str, ...] = option((), "your modules that may be named; on the command line only")
    user_callbacks: Node = option({}, "your callbacks by name, each a _target_ with its arguments")
    task: Node = chosen("problems with verifier: lit_rlkv.tasks.*, or your own")
    environment: Node | None = option(
        None, "answers the turns of responses: lit_rlkv.environments.*, or your own; null: one turn"
    )
    model: ModelConfig = group(ModelConfig)
    cache: CacheConfig = group(CacheConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    correction: Node = chosen("keys that sampler and learner see, and the importance weights between them")
    distillation: Node | None = chosen("Shadow Mask Distillation; null: none")
    reward: RewardConfig = group(RewardConfig)
    roles: RolesConfig = group(RolesConfig)
    sft: SFTConfig = group(SFTConfig)
    evaluation: EvaluationConfig = group(EvaluationConfig)
    optimizer: Node = chosen("of the RL stage: any of torch.optim with its arguments")
    fabric: FabricConfig = group(FabricConfig)
    callbacks: CallbacksConfig = group(CallbacksConfig)
    diagnostics: Node = chosen(
        "measurements that do not change training, each with its interval in iterations"
    )
    logger: Node | None = chosen("where metrics go beside metrics.csv; null: nowhere")
    source: DictConfig = field(default_factory=OmegaConf.create, repr=False, compare=False)
    """The YAML of this config, for the files and loggers that keep it."""

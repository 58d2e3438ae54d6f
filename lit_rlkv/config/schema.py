"""Every key of `python -m lit_rlkv.fit`: type, default, range and meaning, a dataclass per config group.

`--help` and docs/reference/config.md are generated from here. Keys of a node with `_target_` are the
arguments of the class that it names.
"""

from dataclasses import field
from typing import Annotated, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from lit_rlkv.checks import MAX_TEMPERATURE, MIN_TEMPERATURE, Number, Range
from lit_rlkv.config.errors import require
from lit_rlkv.config.options import Node, by_its_group
from lit_rlkv.settings import (
    Bool,
    CacheSettings,
    Fraction,
    InYaml,
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Sampling,
    Share,
    Temperature,
    Text,
    dataclass,
)

Stage = Literal["sft", "rl", "eval"]
Kernels = Literal["auto", "reference", "triton"]
Precision = Literal["32-true", "64-true", "bf16-true", "16-mixed", "bf16-mixed"]
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]
"""A seed, as in Lightning."""
SFT_OPTIMIZER = {
    "_target_": "torch.optim.AdamW",
    "_partial_": True,
    "lr": 2e-3,
    "betas": [0.9, 0.98],
    "weight_decay": 0.01,
}
MAX_PROCESSES = 1024
"""Most processes or threads of a machine."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model: a checkpoint, or a preset that starts from random weights."""

    path: Text | None = None
    """checkpoint folder, GGUF file or hub name, with its own tokenizer; null: the preset"""
    preset: Node | None = field(default_factory=by_its_group)
    """function that builds a model from scratch, such as lit_rlkv.models.presets.*"""


@dataclass(frozen=True, kw_only=True)
class CacheConfig(CacheSettings):
    """The KV cache of rollouts, per sequence, layer and KV head, and what steers its budget."""

    target_overlap: Fraction | None = None
    """steer the budget so that the lowest kv/overlap_p05 of any position stays here, 0.86 for example, from
    measurement to measurement of diagnostics.mismatch; null: a fixed budget"""
    budget_bounds: tuple[PositiveInt, ...] | None = None
    """smallest and largest budget under target_overlap; null: half and twice budget"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Sampling):
    """Sampling and scoring of responses."""

    temperature: Annotated[Number, Range(least=MIN_TEMPERATURE, most=MAX_TEMPERATURE)] = 1.0
    """divides the logits before sampling"""
    n_prompts: PositiveInt = 32
    """prompts per iteration, each with algorithm.group_size responses"""
    max_new_tokens: PositiveInt = 24
    """longest response, in tokens"""
    max_rows: PositiveInt | None = None
    """most responses sampled at a time, which bounds the cache; null: all"""
    prefill_chunk: PositiveInt | None = None
    """most tokens of a prompt in one forward, which bounds the memory of prefill; after each chunk the cache
    is compacted to its budget; null: each prompt in one piece"""
    max_turns: PositiveInt = 8
    """most turns of a response; only with an environment"""
    max_observation_tokens: PositiveInt = 256
    """most tokens of an observation, whose text is cut; max_new_tokens counts them too"""
    environment_timeout_s: Annotated[Number, Range(above=0, most=86_400)] | None = 10.0
    """time limit of a reset or step, after which the response has failed; null: none, and they are called one
    after another, so that a rollout depends on the seed alone"""
    environment_workers: Annotated[int, Range(least=1, most=4096)] = 64
    """environments that are called at a time"""
    n_shards: PositiveInt | None = None
    """parts of the prompts with random numbers of their own; fixed, a run is the same on 1 to n_shards
    processes; null: one per process"""
    cuda_graph: Bool | None = None
    """capture the decode step as a CUDA graph; null: on CUDA, if the model can be captured"""
    n_splits: Annotated[int, Range(least=1, most=128)] | None = None
    """parts of a row's cache that the decode attention kernel reads in parallel, as num_splits of
    FlashAttention; a number keeps its rounding the same in any batch; null: more for fewer rows"""
    compile_layers: Bool = False
    """fuse the decoder layers of decode steps by torch.compile; compiling takes seconds per layer, again for
    another number of rows"""
    replay_routing: Bool = False
    """policy, reference and critic take the experts that the sampler's routers chose for each token (R3,
    rollout routing replay); refused for a model without top-k routers"""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL divergence to the reference, under the learner's own view."""

    weight: NonNegativeNumber = 0.0
    """coefficient; 0 leaves this KL out"""
    place: Literal["loss", "reward"] = "loss"
    """a loss term with a gradient, or a penalty on the reward of each token"""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """of the KL per token; k1 only in the reward"""
    bias_correction: Bool = False
    """multiply k3 in the loss by π/π_old: its gradient is then that of the KL (arXiv:2512.02556)"""
    target: PositiveNumber | None = None
    """nats per response that the weight is steered to (arXiv:1909.08593); null: it is fixed"""
    horizon: PositiveNumber = 10_000.0
    """responses over which the weight is steered"""

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

    every: PositiveInt | None = None
    """iterations after which the reference becomes alpha · policy + (1 − alpha) · reference, with roles=full
    or roles=ppo; null: it stays the starting model"""
    alpha: Annotated[Number, Range(above=0, most=1)] = 0.6
    """share of the policy in the new reference"""


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Problems of a dataset drawn by success rates p, with weights p (1 − p) + floor (arXiv:2504.03380)."""

    decay: Annotated[Number, Range(least=0, below=1)] | None = None
    """draw by success rates, and keep this share of a problem's old rate in the new one, 0: none of it; null:
    problems come epoch by epoch. Success is the score that reward.accuracy names, from 0 to 1"""
    floor: PositiveNumber = 0.05
    """of the weights, so that problems never or always solved return"""


@dataclass(frozen=True, kw_only=True)
class EvictionConfig:
    """Evictions as actions of a policy with parameters, trained beside the tokens; cache.policy=learned."""

    weight: NonNegativeNumber = 1.0
    """weight of the policy gradient of the evictions; 0: the scorer stays as it is"""
    lr_scale: PositiveNumber = 30.0
    """learning rate of the scorer, relative to the policy's"""
    clip: Fraction = 0.2
    """bound of the change of each decision's probability ratio"""
    kl_coef: NonNegativeNumber = 0.0
    """coefficient of the KL of the first draw to a uniform one; 0: none"""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Keys that all algorithms share."""

    group_size: PositiveInt = 8
    """responses to each prompt"""
    n_iterations: PositiveInt = 130
    """iterations: a rollout and the updates on it"""
    resample: NonNegativeInt = 0
    """most further rounds of prompts in an iteration, whose groups replace those of equal rewards in the same
    shard"""
    curriculum: CurriculumConfig = CurriculumConfig()
    n_epochs: PositiveInt = 1
    """passes over each rollout"""
    n_minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    critic_warmup: NonNegativeInt = 0
    """first iterations, in which the critic alone learns"""
    mask_truncated: Bool = False
    """leave responses cut at max_new_tokens out of the policy's loss, but not out of their number"""
    max_grad_norm: PositiveNumber | None = 1.0
    """norm that gradients are clipped to; null: not clipped"""
    policy_weight: NonNegativeNumber = 1.0
    """weight of the algorithm's own loss; 0 trains by distillation alone"""
    entropy_coef: NonNegativeNumber = 0.0
    """weight of an entropy bonus, over the tokens and by the mean of the loss; 0: none"""
    n_warmup_steps: NonNegativeInt = 0
    """first optimizer steps, in which the learning rate rises"""
    lr_schedule: Literal["linear", "constant"] = "linear"
    """linear falls to 0 at the last iteration"""
    kl: KLConfig = KLConfig()
    reference_sync: ReferenceSyncConfig = ReferenceSyncConfig()
    eviction: EvictionConfig = EvictionConfig()
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """how token losses become one: mean of tokens, of responses, or over a constant length"""
    advantage: Node = field(default_factory=by_its_group)
    """advantage estimator: GroupAdvantage, GAEAdvantage, ReturnAdvantage, PairAdvantage, or your own"""
    loss: Node = field(default_factory=by_its_group)
    """LightningModule with the policy's loss: GRPO, CISPO, Reinforce, PPO, OnlineDPO, TokenLoss, or yours"""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Components, weights and normalisation of the reward of a response."""

    verifier: NonNegativeNumber = 0.0
    """weight of the task's score, which is always logged"""
    learned: NonNegativeNumber = 0.0
    """weight of the reward role's score; 0 leaves the role out"""
    environment: NonNegativeNumber = 0.0
    """weight of the environment's reward, the sum over the turns, which is always logged"""
    functions: Node = field(default_factory=OmegaConf.create)
    """more scores by name, each a _target_ of lit_rlkv.rewards with a weight"""
    accuracy: Text | None = None
    """the function that evaluations count right answers by, or `environment`; null: the environment where
    only it has a weight, else the task's own score, or without answers the only rewarded function"""
    max_failed: Share = 0.5
    """share of an iteration's responses whose reward may fail before the run ends"""
    normalize: Literal["none", "batch", "running"] = "none"
    """batch: mean 0, std 1 over the iteration; running: over all rewards so far"""
    clip: PositiveNumber | None = None
    """bound on the size of the normalised reward; null: none"""
    missing_eos_penalty: NonNegativeNumber = 0.0
    """taken off a response that was cut at rollout.max_new_tokens"""
    overlong_buffer: PositiveInt | None = None
    """last tokens before rollout.max_new_tokens in which overlong_penalty rises from 0; null: no penalty"""
    overlong_penalty: NonNegativeNumber = 1.0
    """taken off a response of rollout.max_new_tokens under overlong_buffer"""


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """Policy, reference, reward model and critic on one backbone or several (arXiv:2309.00754)."""

    layout: Literal["ppo", "lora_ppo", "dynamic_lora", "j_hydra", "hydra"] = "hydra"
    """which roles share a backbone or train an adapter; roles=full trains all weights"""
    rank: PositiveInt = 32
    """rank of the LoRA adapters"""
    alpha: PositiveInt = 64
    """scale of the LoRA adapters, divided by rank"""
    target_modules: Text | tuple[Text, ...] = "all-linear"
    """adapted modules, or a list of their names"""
    value_init: Literal["zero", "reward"] = "zero"
    """reward: the critic's head starts from the reward head"""
    value_view: Literal["shadow", "dense"] = "shadow"
    """keys that the critic sees: those that the sampler saw, or all"""
    gradient_checkpointing: Bool | Literal["auto", "host"] = "auto"
    """recompute layers in the backward pass, MLPs and norms in tiles of 4,096 tokens: less memory, one more
    forward; host: what is kept, the inputs of layers, is in host memory; auto: as much as fits, by counted
    bytes"""
    shadow_attention: Literal["lists", "segments"] = "lists"
    """attention of the learner: by lists of keys for blocks of queries, or between evictions by torch's flash
    kernels, where heads, dtype and interval fit them"""


@dataclass(frozen=True, kw_only=True)
class OnPolicyPairsConfig:
    """One more SFT pass, on pairs against wrong answers of the model itself under the run's cache."""

    n_prompts: NonNegativeInt = 0
    """prompts that the model answers, at rollout.temperature; 0: no such pass"""
    n_steps: PositiveInt = 300
    """optimizer steps of this pass"""
    reward_weight: PositiveNumber = 1.0
    """weight of the ranking loss in this pass"""


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Hydra-SFT: worked solutions for the LM head, preference pairs for the reward head."""

    joint: Bool = True
    """both heads on one backbone; false trains a reward model of its own, from the finished LM"""
    n_steps: PositiveInt = 800
    """optimizer steps"""
    reward_steps: Annotated[PositiveInt, InYaml("${.n_steps}")] = 800
    """optimizer steps of a reward model of its own"""
    n_warmup_steps: NonNegativeInt = 30
    """first steps, in which the learning rate rises"""
    batch_size: PositiveInt = 64
    """worked solutions in a batch"""
    n_pairs: NonNegativeInt = 16
    """rows of each batch that also bring a rejected completion; 0: the LM head alone"""
    reward_weight: NonNegativeNumber = 0.1
    """weight of the ranking loss beside the LM loss; 0: the LM head alone"""
    on_policy_pairs: OnPolicyPairsConfig = OnPolicyPairsConfig()
    eviction_steps: NonNegativeInt = 0
    """further optimizer steps, in which the scorer of cache.policy=learned learns to foresee the finished
    LM's dense attention; 0: RL begins with a new scorer"""
    steps_per_iteration: PositiveInt = 50
    """steps between two checkpoints and log rows"""
    max_grad_norm: PositiveNumber | None = 1.0
    """norm that gradients are clipped to; null: not clipped"""
    seed: Annotated[Seed, InYaml("${seed}")] = 0
    """seed of the data and the initial weights"""
    optimizer: Node = field(default_factory=lambda: OmegaConf.create(SFT_OPTIMIZER))
    """of the SFT stage: any of torch.optim with its arguments"""

    @property
    def trains_reward_head(self) -> bool:
        """True if the stage trains a reward head."""
        on_task_pairs = self.n_pairs > 0 and (self.reward_weight > 0 or not self.joint)
        return on_task_pairs or self.on_policy_pairs.n_prompts > 0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Sampling):
    """Accuracy on held-out prompts, dense and for each budget, before and after training."""

    n_prompts: PositiveInt = 512
    """held-out prompts, which training never sees"""
    temperature: Temperature = 0.0
    """of the responses that are scored; 0: greedy"""
    n_mismatch: PositiveInt = 128
    """prompts also sampled as in rollouts, for KL(μ‖dense policy) and the replay gap"""
    budgets: tuple[PositiveInt, ...] = (10, 12, 14)
    """budgets to evaluate beside dense and cache.budget, in keys"""
    batch_size: Literal["auto"] | PositiveInt = "auto"
    """most responses sampled at a time; auto: up to 512, as many as memory holds. Another number draws other
    random responses and evictions"""
    perplexity: Text | None = None
    """file (.jsonl, .json, .parquet), folder or dataset with a column `text`: report its perplexity under
    each cache, exp of the mean −log p over all tokens of all texts but the first of each; null: none"""


@dataclass(frozen=True, kw_only=True)
class FabricConfig:
    """Devices, processes and precision, for Lightning Fabric."""

    accelerator: Text = "auto"
    """as in Lightning: auto, cpu, cuda, ..."""
    devices: Literal["auto", -1] | Annotated[int, Range(least=1, most=MAX_PROCESSES)] = "auto"
    """processes on this machine; -1: every device; auto: one, or those that a launcher has started"""
    num_nodes: PositiveInt = 1
    """machines; only a launcher starts processes on others"""
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    """auto: ddp for several processes; fsdp2 shards the layers of large backbones over them"""
    unshard_rollout: Bool = False
    """with fsdp2: gather all layers while sampling and scoring"""
    precision: Precision = "32-true"
    """of weights and computation, as in Lightning"""
    quantization: Literal["4bit"] | None = None
    """4bit: the backbone's weights in NF4 under adapters; needs CUDA and the extra `quant`"""
    n_threads: Annotated[int, Range(least=1, most=MAX_PROCESSES)] | None = None
    """CPU threads of each process; null: as torch chooses"""
    tokens_per_pass: Literal["auto"] | PositiveInt = "auto"
    """most tokens in a pass of SFT, scoring and update, padding included: less memory, the same gradient;
    auto: up to 16384, as many as memory holds"""

    def __post_init__(self) -> None:
        require(
            not self.unshard_rollout or self.strategy == "fsdp2",
            f"fabric.unshard_rollout=true, but fabric.strategy={self.strategy} shards nothing; drop one",
        )


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """Checkpoints and samples."""

    checkpoint_every: PositiveInt = 1
    """iterations between checkpoints; the last is always saved"""
    keep_last: PositiveInt = 2
    """newest checkpoints to keep; resume takes the newest whole one"""
    keep_best: NonNegativeInt = 0
    """more checkpoints to keep, the best by best_metric"""
    best_metric: Text = "reward"
    """any metric of metrics.csv"""
    best_mode: Literal["max", "min"] = "max"
    """which values of best_metric are best"""
    samples_every: PositiveInt = 20
    """iterations between printed samples"""
    n_samples: PositiveInt = 4
    """responses shown each time"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    seed: Seed = 0
    """seed of every random number"""
    kernels: Kernels = "auto"
    """auto: Triton on CUDA, plain PyTorch elsewhere"""
    stages: tuple[Stage, ...] = ("sft", "rl", "eval")
    """stages of the run: sft, rl, eval"""
    resume: Text | None = None
    """folder of an interrupted run, or auto: the newest run of this config"""
    runs_dir: Text = "runs"
    """folder of run folders and of the SFT models that runs share"""
    trusted_modules: tuple[Text, ...] = ()
    """your modules that may be named; on the command line only"""
    user_callbacks: Node = field(default_factory=OmegaConf.create)
    """your callbacks by name, each a _target_ with its arguments"""
    task: Node = field(default_factory=by_its_group)
    """problems with verifier: lit_rlkv.tasks.*, or your own"""
    environment: Node | None = None
    """answers the turns of responses: lit_rlkv.environments.*, or your own; null: one turn"""
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig(policy="random", budget=16, interval=5, sink=1, window=3)
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: Node = field(default_factory=by_its_group)
    """keys that sampler and learner see, and the importance weights between them"""
    distillation: Node | None = field(default_factory=by_its_group)
    """Shadow Mask Distillation; null: none"""
    reward: RewardConfig = RewardConfig()
    roles: RolesConfig = RolesConfig()
    sft: SFTConfig = SFTConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optimizer: Node = field(default_factory=by_its_group)
    """of the RL stage: any of torch.optim with its arguments"""
    fabric: FabricConfig = FabricConfig()
    callbacks: CallbacksConfig = CallbacksConfig()
    diagnostics: Node = field(default_factory=by_its_group)
    """measurements that do not change training, each with its interval in iterations"""
    logger: Node | None = field(default_factory=by_its_group)
    """where metrics go beside metrics.csv; null: nowhere"""
    source: DictConfig = Field(default_factory=OmegaConf.create, exclude=True, repr=False)
    """The YAML of this config, for the files and loggers that keep it."""

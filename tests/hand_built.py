"""A toy run put together by hand, for tests of the loop, the modules and the callbacks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config.schema import AlgorithmConfig, CacheConfig, RewardConfig, RolesConfig, RolloutConfig
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.distributed.ranks import SINGLE_PROCESS
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.experience.advantages import AdvantageEstimator, GroupAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.attention import Replay
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.modules.grpo import GRPO
from lit_rlkv.modules.online_dpo import OnlineDPO
from lit_rlkv.modules.ppo import PPO
from lit_rlkv.objectives.corrections import Correction, masked, sparse_rl, truncated, unweighted
from lit_rlkv.rewards import RewardManager
from lit_rlkv.tasks import ChainSum
from lit_rlkv.trainer import train
from lit_rlkv.types import Record, Rollout, TrainBatch

SPEC = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
REPLAY = Correction(samples_dense=False, replays=True, weight_fn=unweighted, bypass_mode=True)
ARMS = {
    "dense": Correction(True, True, unweighted, bypass_mode=True),
    "naive": Correction(False, False, unweighted),
    "tis": Correction(False, False, truncated),
    "mis": Correction(False, False, masked),
    "sparse_rl": Correction(False, False, sparse_rl),
    "shadow": REPLAY,
}
LORA = LoraSpec(rank=4, alpha=8, target_modules="all-linear")
TRAINED_HEAD = {"linear.weight": torch.linspace(-1, 1, 32)[None], "linear.bias": torch.tensor([0.3])}
"""A reward head that has an opinion."""


class DigitsAreGood(ChainSum):
    """An untrained model scores here now and then: any completion that starts with a digit is right."""

    def score(self, problem, completion):
        return float(completion[:1].isdigit())


def make_model(seed: int = 0, **size: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "intermediate_size": 32} | size
    model = tiny_qwen3(51, 0, 1, **shape)
    # Sharper than at initialisation, so that what eviction hides makes a difference.
    for parameter in model.parameters():
        parameter.data.mul_(4.0) if parameter.ndim == 2 else None
    return prepare_backbone(model)


def make_roles(layout: str = "hydra", needed=("policy", "reference"), seed: int = 0, **options) -> Roles:
    """The roles of a layout on copies of one small model; adapters alike for every layout and seed."""
    torch.manual_seed(seed)
    heads = {"reward_head": TRAINED_HEAD, "value_head": TRAINED_HEAD}
    options = {"lora": LORA} | heads | options
    return Roles(layout, lambda role: make_model(seed), needed=needed, **options)


def shift(roles: Roles, std: float = 0.05, seed: int = 1) -> Roles:
    """Move the adapters or trained backbones away from zero, so that ratios and KL are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=std, generator=generator)
        elif roles.layout.trains_backbones and parameter.requires_grad and name.startswith("backbones."):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return roles


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_module(roles: Roles, replays: bool = True, **options) -> GRPO:
    options = {"clip_low": 0.2, "clip_high": 0.2} | options
    return GRPO(roles, make_optimizer, replays=replays, temperature=1.0, **options)


def make_ppo(roles: Roles, replays: bool = True, **options) -> PPO:
    options = {"clip_low": 0.2, "clip_high": 0.2, "value_clip": 0.2, "value_weight": 0.5} | options
    options = {"value_shadow": replays} | options
    return PPO(roles, make_optimizer, replays=replays, temperature=1.0, **options)


def make_dpo(roles: Roles, replays: bool = True, **options) -> OnlineDPO:
    options = {"beta": 0.5} | options
    return OnlineDPO(roles, make_optimizer, replays=replays, temperature=1.0, **options)


def gradients_of(module: PolicyModule, batches: Iterable[TrainBatch]) -> dict[str, Tensor]:
    """Return the gradients of the parameters after the micro-batches of a step, by name."""
    module.zero_grad()
    for batch in batches:
        module.training_step(batch, 0)["loss"].backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def steps_of(batches: Iterable[TrainBatch]) -> list[list[TrainBatch]]:
    """Return the micro-batches of each optimizer step."""
    steps: list[list[TrainBatch]] = [[]]
    for batch in batches:
        steps[-1].append(batch)
        if batch.ends_step:
            steps.append([])
    return steps[:-1]


def tokens_of(rollout: Rollout) -> list[tuple[int, ...]]:
    """Return the tokens of each row without its padding, which tell rows that have moved."""
    rows = zip(rollout.input_ids, rollout.attention_mask, strict=True)
    return [tuple(input_ids[attention_mask].tolist()) for input_ids, attention_mask in rows]


def one_row(evicted_at, n_pad: int = 1, n_prompt: int = 2) -> Rollout:
    """A rollout of one row: padding, prompt, and actions up to the last column of evicted_at."""
    table = torch.as_tensor(evicted_at, dtype=torch.int32)[None]
    seq = table.shape[-1]
    attention_mask = torch.arange(seq)[None] >= n_pad
    response_mask = torch.arange(seq)[None] >= n_pad + n_prompt
    table = table.masked_fill(~attention_mask[:, None, None], 0)
    tokens, logps = torch.zeros(1, seq).long(), torch.zeros(1, seq)
    return Rollout(tokens, attention_mask, response_mask, logps, Record(table), 0)


def replayed(rollout: Rollout, *, shadow: bool = True) -> Record:
    """Return what a learner replays of a rollout."""
    return rollout.record.view(rollout.attention_mask, shadow=shadow)


def with_rewards(experience: Experience, total: list[float]) -> Experience:
    rewards = replace(experience.rewards, total=torch.tensor(total, dtype=torch.float32))
    return replace(experience, rewards=rewards)


TRUNCATED = {"top_k": 12, "top_p": 0.9}
"""Options of a rollout whose sampler chooses from small sets of tokens."""


def over_sets(logits: Tensor, rollout: Rollout) -> Tensor:
    """Return logits [response token, vocab] with -inf for what the sampler did not choose from."""
    masks = rollout.record.sampling_masks
    if masks is None:
        return logits
    counts = masks.counts[rollout.response_mask].tolist()
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(torch.split(masks.token_ids, counts)):
        is_kept[row, ids.long()] = True
    assert not is_kept.all()
    return logits.masked_fill(~is_kept, -torch.inf)


def plain_logits(backbone: PreTrainedModel, rollout: Rollout, record: Record) -> Tensor:
    """Return logits [response token, vocab] by one plain forward, -inf for what was not sampled from."""
    positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    logits = backbone(
        input_ids=rollout.input_ids,
        position_ids=positions,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        replay=Replay(record),
        use_cache=False,
    ).logits
    return over_sets(logits[:, :-1][rollout.response_mask[:, 1:]], rollout)


@contextmanager
def counted_forwards(roles: Roles) -> Iterator[list[str]]:
    """The names of the backbones that were run inside the block, one for each forward."""
    forwards: list[str] = []
    handles = [
        roles.named_backbone(name).base_model.register_forward_hook(
            lambda module, args, output, name=name: forwards.append(name)
        )
        for name in roles.backbones
    ]
    yield forwards
    for handle in handles:
        handle.remove()


class MetricLog(RLCallback):
    """The metrics of every iteration, and how many optimizer steps there were in all."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.n_steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.n_steps += 1

    def on_iteration_end(self, iteration, n_iterations, metrics) -> None:
        self.rows.append(dict(metrics))


def train_here(module, datamodule, n_iterations: int) -> MetricLog:
    log = MetricLog()
    train(
        Fabric(accelerator="cpu"),
        module,
        datamodule,
        callbacks=[log],
        n_iterations=n_iterations,
        max_grad_norm=1.0,
    )
    return log


def make_run(task, tokenizer, rollout, *, parts=None, rewards=None, environments=None, **config):
    """Return the part of a run that rollouts and evaluations need."""
    defaults = {"seed": 0, "cache": CacheConfig(), "reward": RewardConfig(verifier=1.0)}
    return SimpleNamespace(
        cfg=SimpleNamespace(**defaults | config, rollout=rollout),
        parts=parts,
        tokenizer=tokenizer,
        task=task,
        rewards=rewards or RewardManager({}),
        environments=environments,
        ranks=SINGLE_PROCESS,
    )


def make_datamodule(
    roles: Roles,
    correction: Correction = REPLAY,
    spec: CacheSpec = SPEC,
    seed: int = 0,
    advantage: AdvantageEstimator | None = None,
    reward=None,
    functions=None,
    environment=None,
    tokenizer=None,
    task=None,
    rollout=None,
    roles_config=None,
    learner_parts=(("policy",),),
    warmup_part=("value",),
    tokens_per_pass=TOKENS_PER_PASS,
    **algorithm,
) -> RolloutDataModule:
    task, tokenizer = task or DigitsAreGood(n_terms=3), tokenizer or build_task_tokenizer()
    settings = RolloutConfig(**{"n_prompts": 4, "max_new_tokens": 10} | (rollout or {}))
    algorithm = {"group_size": 4, "n_minibatches": 1, "aggregation": "sequence"} | algorithm
    run = make_run(
        task,
        tokenizer,
        settings,
        parts=SimpleNamespace(
            cache=spec, correction=correction, advantage=advantage or GroupAdvantage("grpo")
        ),
        rewards=RewardManager(functions or {}),
        environments=None if environment is None else EnvironmentPool(environment, settings, tokenizer),
        seed=seed,
        algorithm=AlgorithmConfig(**algorithm),
        reward=reward or RewardConfig(verifier=1.0),
        roles=roles_config or RolesConfig(),
    )
    module = SimpleNamespace(
        roles=roles, learner_parts=learner_parts, warmup_part=warmup_part, evictions=None
    )
    return RolloutDataModule(run, module, tokens_per_pass=tokens_per_pass)

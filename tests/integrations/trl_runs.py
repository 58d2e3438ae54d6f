"""Short trainings of a toy model under TRL's GRPOTrainer and RLOOTrainer, and ours."""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from lit_rlkv import prepare_backbone
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.integrations.trl import EvictingGRPOTrainer, EvictingRLOOTrainer
from lit_rlkv.integrations.trl.batches import rollout_of
from lit_rlkv.models.backbone import head_logits, hidden_states, token_positions
from lit_rlkv.models.presets import tiny_qwen3
from tests.hand_built import replayed

PROMPTS = ["2+3=", "40+2=1", "7+8=", "100+11=", "1", "9+9+9+9=", "3+3=", "12+5="]
IN_TWO_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWICE = {"num_iterations": 2, "max_steps": 4}
EVICTS = {"cache_budget": 8, "cache_interval": 2, "cache_sink": 1, "cache_window": 2}
KEEPS_ALL = {**EVICTS, "cache_budget": 64}


def tokenizer():
    return build_task_tokenizer()


def save_model(folder, scale=4.0, vocabulary=None):
    """Save a model of two layers whose attention is far from uniform; return its folder."""
    vocabulary = vocabulary or tokenizer()
    torch.manual_seed(0)
    model = tiny_qwen3(
        len(vocabulary),
        vocabulary.pad_token_id,
        vocabulary.eos_token_id,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=2048,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def score(completions, **_):
    """Share of digits, a reward that differs within a group."""
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


class Recorder:
    """Reward function that keeps the completions it sees, for `rollout_func` to give them to another trainer.

    It also seeds torch, because TRL then shuffles the rollout, and samplers have drawn differently before.
    """

    __name__ = "score"

    def __init__(self):
        self.completions = []

    def __call__(self, completions, completion_ids, **_):
        self.completions.append([list(ids) for ids in completion_ids])
        torch.manual_seed(len(self.completions))
        return score(completions)

    def rollout_func(self):
        """Return TRL's `rollout_func` that gives the same completions once more."""
        calls = iter(self.completions)

        def rollout(prompts, trainer):
            ids = next(calls)
            assert len(ids) == len(prompts)
            return {
                "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
                "completion_ids": ids,
                "logprobs": [[0.0] * len(row) for row in ids],
            }

        return rollout


def build(
    model,
    folder,
    *,
    trainer=EvictingGRPOTrainer,
    reward=score,
    arguments=None,
    vocabulary=None,
    prompts=PROMPTS,
    **options,
):
    """Return a trainer of three steps, of 4 completions to each of 2 prompts."""
    is_ours = issubclass(trainer, EvictingGRPOTrainer | EvictingRLOOTrainer)
    plain_config = GRPOConfig if issubclass(trainer, GRPOTrainer) else RLOOConfig
    defaults = {
        "output_dir": str(folder),
        "max_steps": 3,
        "logging_steps": 1.0,  # of TRL's type, which the test run checks
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 14,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        **(EVICTS if is_ours else {}),
    }
    config = (trainer.config_class if is_ours else plain_config)(**defaults | options)
    return trainer(
        model=model,
        args=config,
        reward_funcs=reward,
        processing_class=vocabulary or tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **arguments or {},
    )


def train(*args, **options):
    """Train, and return the trainer and its logs of each step."""
    trainer = build(*args, **options)
    trainer.train()
    return trainer, [row for row in trainer.state.log_history if "loss" in row]


class PlainRLOO(RLOOTrainer):
    """TRL's RLOOTrainer with the `rollout_func` that its GRPOTrainer has."""

    def __init__(self, *args, rollout_func, **options):
        self._rollout_func = rollout_func
        super().__init__(*args, **options)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        return self._rollout_func(self.processing_class.batch_decode(prompt_ids), self)["completion_ids"]


PLAIN = {EvictingGRPOTrainer: GRPOTrainer, EvictingRLOOTrainer: PlainRLOO}


def train_plain(model, folder, recorder, *, trainer=EvictingGRPOTrainer, **options):
    """Train TRL's own trainer in place of ours on the completions of another training."""
    options = {name: value for name, value in options.items() if name not in EVICTS}
    arguments = {**(options.pop("arguments", None) or {}), "rollout_func": recorder.rollout_func()}
    own = Recorder()
    found = train(model, folder, trainer=PLAIN[trainer], reward=own, arguments=arguments, **options)
    assert own.completions == recorder.completions
    return found


class Watched(EvictingGRPOTrainer):
    """Keeps the batches of the loss."""

    def _compute_loss(self, model, inputs):
        self.batches = [*getattr(self, "batches", []), inputs]
        return super()._compute_loss(model, inputs)


def kept_logits(logits, batch):
    """Return the logits of the completion with -inf for the tokens that the sampler did not keep."""
    rollout = rollout_of(batch["rollout_rows"])
    masks, is_kept = rollout.record.sampling_masks, torch.ones_like(logits, dtype=torch.bool)
    places = rollout.response_mask[:, -logits.shape[1] :].nonzero().tolist()
    counts = masks.counts[rollout.response_mask].tolist()
    for (row, column), ids in zip(places, masks.token_ids.long().split(counts), strict=True):
        is_kept[row, column] = False
        is_kept[row, column, ids] = True
    assert not is_kept.all()
    return logits.masked_fill(~is_kept, -torch.inf)


def completion_logits(model, batch, *, shadow):
    """Return the logits that predict the completion, under replay or by the model's own attention."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    positions = token_positions(mask)
    if shadow:
        prepare_backbone(model)
        record = replayed(rollout_of(batch["rollout_rows"]))
        logits = head_logits(model, hidden_states(model, input_ids, positions, record=record))
    else:
        model.set_attn_implementation("eager")
        logits = model(input_ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, batch["prompt_ids"].shape[1] - 1 : -1]

"""The model and the lengths that all variants of the memory table share."""

from dataclasses import asdict, dataclass
from random import Random

import torch
from memory_model import Decoder, Job
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.types import Problem

PAD = 0


@dataclass(frozen=True)
class Size:
    """A decoder as `tiny_qwen3` builds it: RMSNorm, RoPE, grouped queries, gated MLP, tied embeddings."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


PRESETS = {
    "tiny": Size(256, 64, 2, 4, 2, 16, 192),
    "small": Size(4096, 512, 8, 8, 4, 64, 1536),
    "1b": Size(32_768, 2048, 24, 16, 8, 128, 6144),
}


@dataclass(frozen=True)
class Setting:
    """Settings that all variants share."""

    size: Size
    prompt_len: int
    """Tokens of every prompt."""
    response_len: int
    """Tokens of every response; none ends early."""
    rank: int
    """Rank of the adapters, which are on all linear layers."""
    cache: CacheSpec
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    checkpoints_layers: bool = False


class RandomWords:
    """Prompts of a fixed number of tokens that nobody verifies; the reward model judges the responses."""

    is_verifiable = False

    def __init__(self, n_words: int, vocab_size: int) -> None:
        self.n_words = n_words
        self.vocab_size = vocab_size

    def sample(self, rng: Random) -> Problem:
        words = [str(rng.randrange(1, self.vocab_size)) for _ in range(self.n_words)]
        return Problem(" ".join(words), "1", "1")

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0

    def corrupt(self, problem: Problem, rng: Random) -> str:
        return "2"


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per number; the end of sequence has an id that the model has no logit for, so none ends."""
    vocabulary = {
        "<pad>": PAD,
        **{str(number): number for number in range(1, vocab_size)},
        "<eos>": vocab_size,
    }
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_backbone(setting: Setting) -> PreTrainedModel:
    """A random model, the same at every call."""
    torch.manual_seed(0)
    sizes = dict(vars(setting.size))
    n_positions = max(1024, setting.prompt_len + setting.response_len)
    with torch.device(setting.device):
        model = tiny_qwen3(
            sizes.pop("vocab_size"), PAD, PAD + 1, max_position_embeddings=n_positions, **sizes
        )
    return prepare_backbone(model.type(setting.dtype).eval())


def described(setting: Setting) -> dict:
    """Return a setting as a row of the record has it."""
    return {**asdict(setting), "dtype": str(setting.dtype), "cache": setting.cache.label}


def job_of(setting: Setting, batch: int) -> Job:
    """The same for the formulas."""
    size = setting.size
    return Job(
        model=Decoder(
            n_layers=size.num_hidden_layers,
            dim=size.hidden_size,
            n_heads=size.num_attention_heads,
            n_kv_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            mlp_dim=size.intermediate_size,
            vocab_size=size.vocab_size,
            is_tied=True,
            qk_norm=True,
        ),
        rank=setting.rank,
        batch=batch,
        prompt_len=setting.prompt_len,
        response_len=setting.response_len,
        n_slots=setting.cache.n_slots(setting.prompt_len + setting.response_len),
        weight_bytes=setting.dtype.itemsize,
        moment_bytes=setting.dtype.itemsize,
        is_checkpointed=setting.checkpoints_layers,
        foreach=setting.device == "cuda",
    )

"""What a phase needs where memory does not suffice, the largest first, and the settings that change it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.rollout.sizes import ModelShape, SamplingSizes, layer_bytes
from lit_rlkv.units import human_bytes


@dataclass(frozen=True)
class Need:
    """Some of the memory of a phase."""

    what: str
    n_bytes: int
    product: str
    """How these bytes come about."""
    helps: Sequence[str]
    """What to do, the best first."""


@dataclass(frozen=True)
class Advice:
    """What to do where sampling is too large, by the names of the settings."""

    cache: str
    rows: str
    """For fewer responses under way at a time."""
    responses: str
    """For fewer in all."""
    length: str


def explained(phase: str, needs: Iterable[Need]) -> str:
    """The needs of a phase from the largest to the smallest, and what helps against them in that order."""
    ordered = sorted(needs, key=lambda need: need.n_bytes, reverse=True)
    lines = [f"  {human_bytes(need.n_bytes):>9}  {need.what} = {need.product}" for need in ordered]
    helps = dict.fromkeys(step for need in ordered for step in need.helps)
    first = f"out of memory in {phase}. Beside weights it takes, the largest first:"
    return "\n".join([first, *lines, f"What helps, the most first: {'; '.join(helps)}."])


def cache_advice(cache: CacheSpec, *, by_correction: bool = False) -> str:
    """For a smaller cache."""
    if by_correction:
        return "choose a correction whose rollouts are under the cache, which this one's are not"
    if cache.is_dense:
        return "set cache.policy to one that evicts, where dense keeps every key"
    return f"lower cache.budget={cache.budget}"


def explain_sampling(phase: str, sizes: SamplingSizes, advice: Advice) -> str:
    """What `generate` needs."""
    model, n_rows = sizes.model, sizes.n_rows
    heads = f"rows × {model.n_kv_heads} KV heads"
    slots = f"{model.n_layers} layers × {n_rows} {heads} × {sizes.n_slots} slots"
    if not sizes.cache.is_dense:
        slots += f" ({sizes.cache.budget} + {sizes.cache.interval})"
    of_cache = (advice.cache, advice.rows, *([advice.length] if sizes.cache.is_dense else []))
    deaths = f"{model.n_layers} layers × {sizes.n_death_rows} {heads} × {sizes.n_columns} columns × 4 bytes"
    step = f"{n_rows} rows × {model.vocab_size} tokens × ({model.itemsize} + 4 × 4) bytes"
    prefilled = f"{sizes.n_prefilled} prompts × "
    logits = f"{prefilled}{model.vocab_size} tokens × {model.itemsize} bytes + {step}"
    width = f"(4 × {model.mlp_dim} + 2 × {model.dim}) × {model.itemsize} bytes"
    prefill = f"{prefilled}{sizes.n_prompt_columns} tokens × {width}"
    keys = f"2 × {slots} × {model.head_dim} dims × {model.itemsize} bytes"
    needs = [
        Need("KV cache", sizes.kv_bytes, keys, of_cache),
        Need("columns of the keys", sizes.slot_record_bytes, f"{slots} × 8 bytes", of_cache),
        Need("record of deaths", sizes.death_bytes, deaths, (advice.length, advice.responses)),
        Need("logits of a decode step", sizes.step_bytes, step, [advice.rows]),
        Need("logits of the prefill", sizes.prefill_logits_bytes, logits, [advice.rows]),
        Need("a layer of the prefill", sizes.prefill_bytes, prefill, [advice.rows]),
    ]
    return explained(f"{phase}, {_amount(sizes)}", needs)


def _amount(sizes: SamplingSizes) -> str:
    return (
        f"{sizes.n_rows} of {sizes.n_responses} responses at a time, {sizes.n_samples} to a prompt of "
        f"{sizes.n_prompt_columns} tokens, of up to {sizes.max_new_tokens} tokens, cache {sizes.cache.label}"
    )


def forward_needs(
    model: ModelShape,
    n_rows: int,
    n_columns: int,
    helps: Sequence[str],
    *,
    has_masks: bool,
    keeps: str | None = None,
) -> list[Need]:
    """Of a forward over whole sequences, at least.

    Args:
        has_masks: attention is without the kernels, which need none.
        keeps: what it leaves for a backward pass: "layers", or their "inputs" alone where they are
            recomputed; None holds one layer at a time.
    """
    n_tokens = n_rows * n_columns
    tokens = f"{n_rows} rows × {n_columns} tokens"
    n_held = model.n_layers if keeps == "layers" else 1
    layers = f"{n_held} layers × " if n_held > 1 else "a layer's "
    size = n_held * layer_bytes(n_tokens, dim=model.dim, mlp_dim=model.mlp_dim, itemsize=model.itemsize)
    product = f"{layers}{tokens} × (4 × {model.mlp_dim} + 2 × {model.dim}) × {model.itemsize} bytes"
    needs = [Need("activations", size, product, helps)]
    if keeps == "inputs":
        product = f"{model.n_layers} layers × {tokens} × {model.dim} × {model.itemsize} bytes"
        n_bytes = model.n_layers * n_tokens * model.dim * model.itemsize
        needs.append(Need("inputs of layers", n_bytes, product, helps))
    if has_masks:
        product = f"{layers}{n_rows} rows × {model.n_heads} heads × {n_columns}² × {model.itemsize} bytes"
        n_bytes = n_held * n_rows * model.n_heads * n_columns**2 * model.itemsize
        needs.append(Need("masks", n_bytes, product, helps))
    return needs

"""Memory that PPO on a role layout, or SFT, needs, computed from the architecture."""

from dataclasses import dataclass

from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.models.layouts import LAYOUTS

FLOAT32 = 4


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with RMSNorm, RoPE, grouped queries, gated MLP: Llama; with `qk_norm`, Qwen3."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    is_tied: bool
    qk_norm: bool

    @property
    def query_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear modules of a layer: q, k, v, o, gate, up, down."""
        d, q, kv, f = self.dim, self.query_dim, self.kv_dim, self.mlp_dim
        return [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d)]

    @property
    def n_weights(self) -> int:
        """vocab·d·(1 or 2) + layers·(Σ in·out + 2d + 2·head_dim if normed) + d."""
        norms = 2 * self.dim + 2 * self.head_dim * self.qk_norm
        layer = sum(a * b for a, b in self.linears) + norms
        return self.n_head_weights * (2 - self.is_tied) + self.n_layers * layer + self.dim

    @property
    def n_head_weights(self) -> int:
        return self.vocab_size * self.dim

    @property
    def n_tensors(self) -> int:
        return 3 - self.is_tied + self.n_layers * (len(self.linears) + 2 + 2 * self.qk_norm)

    def n_adapter(self, rank: int) -> int:
        """layers · rank · Σ (in + out): a LoRA adapter on every linear module of the layers."""
        return self.n_layers * rank * sum(a + b for a, b in self.linears)


LLAMA_7B = Decoder(32, 4096, 32, 32, 128, 11008, 32_000, is_tied=False, qk_norm=False)


@dataclass(frozen=True)
class Variant:
    """Counts of backbones, adapters and heads of a layout."""

    n_copies: int
    """Backbones."""
    n_trained: int
    """Backbones whose weights are all trained."""
    n_adapters: int
    n_heads: int
    """Scalar heads; the last one is trained."""
    n_parts: int
    """Forward and backward passes before an optimizer step, one after the other; the first reads logits."""
    replays: bool
    """True if each attention head has its own mask, as in replay."""


def variant_of(name: str) -> Variant:
    """One of the five layouts with all four roles, or "sft": one model, all of it trained, no scalar head."""
    if name == "sft":
        return Variant(1, 1, 0, 0, 1, replays=False)
    layout = LAYOUTS[name]
    roles = [(layout.backbone[role], layout.adapter[role]) for role in ("policy", "value")]
    return Variant(
        n_copies=len(set(layout.backbone.values())),
        n_trained=2 if layout.trains_backbones else 0,
        n_adapters=len(set(layout.adapter.values()) - {None}),
        n_heads=2,
        n_parts=len(set(roles)),
        replays=True,
    )


@dataclass(frozen=True)
class Job:
    """A batch of sequences and how numbers are kept."""

    model: Decoder
    rank: int
    batch: int
    prompt_len: int
    response_len: int
    n_slots: int
    """Slots of the KV cache per sequence, layer and KV head."""
    weight_bytes: int = 4
    moment_bytes: int = 4
    """Bytes per number of each of Adam's two moments."""
    beside_bytes: int = 4
    """Bytes per number of adapters and heads, and at least of their moments."""
    is_checkpointed: bool = False
    foreach: bool = False
    """True if Adam steps all parameters at once, as on CUDA."""


def static_bytes(variant: Variant, job: Job) -> dict[str, int]:
    """Bytes by kind, exactly: with w weights and a numbers in an adapter,

    weights = copies·w, adapters = n·a, heads = n·(d + 1); of what is trained gradients hold 1×, Adam 2× in
    its own precision and 4 bytes per tensor for the step. An untied output head that a critic never reads is
    not trained.
    """
    model = job.model
    head = model.dim + 1
    adapter = model.n_adapter(job.rank)
    n_unread_heads = max(variant.n_trained - 1, 0) * (not model.is_tied)
    trained_heads = min(variant.n_heads, 1)
    n_whole = variant.n_trained * model.n_weights - n_unread_heads * model.n_head_weights
    n_beside = variant.n_adapters * adapter + trained_heads * head
    moments = n_whole * job.moment_bytes + n_beside * max(job.moment_bytes, job.beside_bytes)
    n_tensors = variant.n_trained * model.n_tensors - n_unread_heads + 2 * trained_heads
    n_tensors += variant.n_adapters * 2 * len(model.linears) * model.n_layers
    return {
        "weights": variant.n_copies * model.n_weights * job.weight_bytes,
        "adapters": variant.n_adapters * adapter * job.beside_bytes,
        "heads": variant.n_heads * head * job.beside_bytes,
        "optimizer": 2 * moments + n_tensors * FLOAT32,
        "gradients": n_whole * job.weight_bytes + n_beside * job.beside_bytes,
    }


def kv_bytes(job: Job) -> int:
    """2·layers·batch·kv_heads·slots·head_dim numbers, exactly."""
    return 2 * job.model.n_layers * job.batch * job.model.kv_dim * job.n_slots * job.weight_bytes


def saved_bytes_per_token(variant: Variant, job: Job) -> int:
    """Bytes that autograd saves of one layer per token, with d, q = heads·head_dim, k, f = MLP, r = rank.

    In float32, whatever the weights are in: the input of each norm, 2d (+ q + k if queries and keys are
    normed), and a number per norm and per head (softmax). In the weights' precision: the input of every
    linear that has something to learn, be it its own weight or a LoRA A: 2d and the attention's output q;
    what attention reads, q + 2k; of the MLP gate, silu(gate), up and their product, 4f; a row of the mask,
    seq per head if each has its own. With LoRA its inner activations, 7r. If the weights train, the norms'
    scales do too, and each norm keeps another 1× of what it normed. A frozen linear keeps nothing.
    """
    model = job.model
    is_whole = variant.n_trained > 0
    d, q, k = model.dim, model.query_dim, model.kv_dim
    normed = 2 * d + (q + k) * model.qk_norm
    statistics = 2 + (model.n_heads + model.n_kv_heads) * model.qk_norm + model.n_heads
    mask = learned_len(variant, job) * (model.n_heads if variant.replays else 1)
    rest = 2 * d + 2 * q + 2 * k + 4 * model.mlp_dim + mask
    rest += normed if is_whole else len(model.linears) * job.rank
    return FLOAT32 * (normed + statistics) + job.weight_bytes * rest


def cast_bytes(variant: Variant, job: Job) -> int:
    """Bytes that autograd also saves of one layer: its adapter in the compute dtype."""
    if variant.n_adapters == 0 or job.beside_bytes == job.weight_bytes:
        return 0
    return job.model.n_adapter(job.rank) // job.model.n_layers * job.weight_bytes


def learned_len(variant: Variant, job: Job) -> int:
    """Columns of a forward that learns: the last token of a rollout predicts nothing, and is left out."""
    return job.prompt_len + job.response_len - variant.replays


def logits_bytes(job: Job) -> int:
    """Three chunks of float32 logits: log-probs, their gradient, and that of the logits."""
    n_response_tokens = job.batch * job.response_len
    return 3 * FLOAT32 * min(n_response_tokens * job.model.vocab_size, MAX_CHUNK_LOGITS)


def update_activations(variant: Variant, job: Job, *, has_logits: bool) -> int:
    """Most bytes besides weights, optimizer and finished gradients in one forward and backward pass.

    layers·(tokens·saved + cast) + tokens·final norm + hidden states of the actions, and the larger of the
    chunk of logits and what the backward pass through one MLP has on top, 2f + 2d per token. Where a tied
    output head trains, its gradient waits for that of the embedding. Under checkpointing layers keep their
    inputs alone, d, and one of them at a time is as above.
    """
    model, is_whole = job.model, variant.n_trained > 0
    n_tokens = job.batch * learned_len(variant, job)
    layer = n_tokens * saved_bytes_per_token(variant, job) + cast_bytes(variant, job)
    backward = n_tokens * job.weight_bytes * 2 * (model.mlp_dim + model.dim)
    backward += job.weight_bytes * model.n_head_weights * (has_logits and is_whole and model.is_tied)
    logits = logits_bytes(job) * has_logits
    ends = n_tokens * model.dim * (FLOAT32 + job.weight_bytes * is_whole)
    ends += job.batch * job.response_len * model.dim * job.weight_bytes
    if job.is_checkpointed:
        inputs = model.n_layers * n_tokens * model.dim * job.weight_bytes
        return inputs + ends + max(logits, layer + backward)
    return model.n_layers * layer + ends + max(logits, backward)


def peak_bytes(variant: Variant, job: Job) -> dict[str, int]:
    """The peak of each phase.

    sampling: what is resident, the KV cache, and the prompt's way through one MLP (4f + 2d per token) or the
    logits of a step. scoring: hidden states of each pass, and the same for whole sequences, or a chunk of
    logits. update: the last part's activations beside the gradients of the parts before, or the optimizer's
    step with all gradients and its temporaries: a copy of what is trained where it steps all at once, else
    two of the largest matrix.
    """
    model, static = job.model, static_bytes(variant, job)
    gradients = static["gradients"]
    resident = sum(static.values()) - gradients
    mlp = job.batch * job.weight_bytes * (4 * model.mlp_dim + 2 * model.dim)
    step_logits = 3 * FLOAT32 * job.batch * model.vocab_size
    seq_len = job.prompt_len + job.response_len
    passes = 3 * job.batch * seq_len * model.dim * job.weight_bytes
    scoring = passes + max(mlp * seq_len, logits_bytes(job))
    earlier = gradients * (variant.n_parts - 1) // variant.n_parts
    largest = max(model.n_head_weights, model.dim * model.mlp_dim) if variant.n_trained else 0
    temporaries = gradients if job.foreach else 2 * largest * job.weight_bytes
    parts = [update_activations(variant, job, has_logits=True)]
    parts += [earlier + update_activations(variant, job, has_logits=False)] * (variant.n_parts > 1)
    update = max(*parts, gradients + temporaries)
    if variant.n_heads == 0:
        return {"update": resident + update}
    return {
        "sampling": resident + kv_bytes(job) + max(mlp * job.prompt_len, step_logits),
        "scoring": resident + scoring,
        "update": resident + update,
    }

"""Draw the pictures of docs/concepts, from a rollout of a tiny random model and from the code itself.

    python docs/pictures.py [FOLDER]

Writes docs/concepts/pictures/*.png, or into FOLDER. It needs no network and no GPU, and takes some seconds.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from lit_rlkv import CacheSpec, Rollout, generate, prepare_backbone, replay_logps
from lit_rlkv.config import CONF_DIR
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.objectives.corrections import CORRECTIONS
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import BLUE, GREEN, INK, MUTED, PURPLE, SAND, VERMILLION
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER

FOLDER = Path(__file__).parent / "concepts" / "pictures"
DPI = 200
"""Twice the 100 pixels per inch of a page."""
N_PROMPT, N_NEW, VOCAB = 8, 24, 64
CACHE = CacheSpec("snapkv", budget=12, interval=4, sink=1, window=4)
WEIGHT_SCALE = 5.0
"""Factor on the random weights; as initialized, attention is uniform, and eviction changes little."""


def tiny_model() -> PreTrainedModel:
    """Return a prepared Qwen3 of two layers and two KV heads with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64}
    return prepare_backbone(
        scaled(tiny_qwen3(VOCAB, 0, 1, num_hidden_layers=2, num_key_value_heads=2, **sizes))
    )


@torch.no_grad()
def scaled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with larger weights."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(WEIGHT_SCALE)
    return model.eval()


def tiny_mixture() -> PreTrainedModel:
    """Return a prepared Qwen3-MoE of two layers, with 2 of 8 experts for a token and random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 32, "vocab_size": VOCAB}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(**sizes, **layers, num_experts=8, num_experts_per_tok=2, pad_token_id=0)
    return prepare_backbone(scaled(AutoModelForCausalLM.from_config(config)))


def sample(model: PreTrainedModel, n_rows: int = 64, **options: object) -> Rollout:
    """Return responses under CACHE."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, VOCAB, (n_rows, N_PROMPT), generator=generator)
    options |= {"max_new_tokens": N_NEW, "eos_token_id": None, "pad_token_id": 0}
    return generate(model, prompts, torch.ones_like(prompts), cache=CACHE, generator=generator, **options)


@torch.no_grad()
def log_ratio(model: PreTrainedModel, rollout: Rollout, shadow: bool) -> Tensor:
    """Return log π_learner − log μ of the response tokens, [response, token]."""
    gap = replay_logps(model, rollout, shadow=shadow) - rollout.rollout_logps
    return gap[:, N_PROMPT:]


def box(axes: Axes, place: tuple[float, ...], text: str, color: str, *, ink: str = "white") -> None:
    """Draw a rounded box (x, y, width, height) with its text; dark ink: white, with a dashed border."""
    x, y, width, height = place
    border = {"boxstyle": "round,pad=0,rounding_size=0.12", "lw": 1.4, "ec": color}
    fill = {"fc": color} if ink == "white" else {"fc": "white", "ls": (0, (4, 3))}
    axes.add_patch(FancyBboxPatch((x, y), width, height, **border, **fill))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=9)


def arrow(axes: Axes, x: tuple[float, float], y: tuple[float, float], color: str = INK) -> None:
    """Draw an arrow from (x[0], y[0]) to (x[1], y[1])."""
    head = {"arrowstyle": "-|>", "mutation_scale": 16, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch((x[0], y[0]), (x[1], y[1]), color=color, **head))


def caption(axes: Axes, x: float, y: float, text: str, color: str = INK, **more: object) -> None:
    axes.text(x, y, text, color=color, va="center", **{"ha": "center", "fontsize": 9} | more)


def draw_mask(axes: Axes, state: np.ndarray, title: str, x_label: str, y_label: str) -> None:
    """Draw a matrix of 0 (nothing), 1 (evicted), 2 (seen)."""
    colors = ListedColormap(["white", SAND, BLUE])
    axes.imshow(state, cmap=colors, vmin=0, vmax=2, interpolation="nearest", aspect="auto")
    n_rows, n_columns = state.shape
    axes.set_xticks(np.arange(-0.5, n_columns), minor=True)
    axes.set_yticks(np.arange(-0.5, n_rows), minor=True)
    axes.grid(which="minor", color="white", lw=0.6)
    axes.tick_params(which="both", length=0, labelsize=8, labelcolor=MUTED)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    style.label_axes(axes, x_label, y_label)


def color_legend(figure: Figure, place: str, n_columns: int = 3, **colors: str) -> None:
    handles = [Patch(color=color, label=name.replace("_", " ")) for name, color in colors.items()]
    figure.legend(handles=handles, loc=place, ncols=n_columns, frameon=False, fontsize=9)


def mask_of(evicted_at: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the causal mask and the replay mask of one head, [query, key]."""
    n = len(evicted_at)
    query, key = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    is_causal = key <= query
    return is_causal.numpy(), (is_causal & (query < evicted_at)).numpy()


def evicting_cache(rollout: Rollout) -> Figure:
    """Lifetimes of the keys of one response in two heads, and the number of cached keys at each step."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    *heads, counts = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    n_keys = rollout.input_ids.shape[1] - 1
    for head, axes in enumerate(heads):
        is_causal, is_seen = mask_of(rollout.evicted_at[0, 0, head, :n_keys])
        state = (is_causal.astype(int) + is_seen).T
        draw_mask(axes, state, f"layer 0, KV head {head}", "step", "key" if head == 0 else "")
        axes.axvline(N_PROMPT - 0.5, color=VERMILLION, lw=1.5)
        n_cached = is_seen.sum(axis=1)
    style.style_axes(counts)
    step = np.arange(n_keys)
    counts.step(step, step + 1, where="mid", color=MUTED, lw=1.6, ls="--", label="dense cache")
    counts.step(step, n_cached, where="mid", color=BLUE, lw=2.2, label="evicting cache")
    for height, name, side in (
        (CACHE.budget, f"budget {CACHE.budget}", "top"),
        (CACHE.budget + CACHE.interval, f"budget + interval = {CACHE.budget + CACHE.interval}", "bottom"),
    ):
        counts.axhline(height, color=VERMILLION, lw=0.9)
        above = 0.3 if side == "bottom" else -0.3
        backed = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        place = {"ha": "right", "va": side, "bbox": backed, "zorder": 2.5}
        counts.text(n_keys - 0.5, height + above, name, color=VERMILLION, fontsize=8.5, **place)
    counts.set_title("keys that a query sees", fontsize=10, color=INK, loc="left")
    style.label_axes(counts, "step", "")
    counts.set_ylim(0, n_keys + 2)
    counts.legend(frameon=False, fontsize=8.5, loc="upper left")
    colors = {"in_the_cache": BLUE, "evicted": SAND, "the_response_begins": VERMILLION}
    color_legend(figure, "outside upper left", **colors)
    return figure


@torch.no_grad()
def turns(model: PreTrainedModel) -> Figure:
    """The keys of one head while a long prompt is read in chunks and a response is given tokens."""
    n_prompt, n_turn, n_given, chunk = 36, 12, 9, 8
    generator = torch.Generator().manual_seed(1)
    prompt, given = (torch.randint(1, VOCAB, (1, n), generator=generator) for n in (n_prompt, n_given))
    settings = DecodeSettings(n_turn + n_given + n_turn, torch.tensor([], dtype=torch.long), 0, Sampling())
    decoder = Decoder(model, CACHE, 1, n_prompt, settings, generator, cuda_graph=None, prefill_chunk=chunk)
    decoder.prefill([0], prompt, torch.ones_like(prompt, dtype=torch.bool))
    for _ in range(n_turn - 1):
        decoder.step()
    decoder.feed([0], given, torch.ones_like(given, dtype=torch.bool))
    for _ in range(n_turn - 1):
        decoder.step()
    evicted_at = decoder.read_rows([0]).parts["evicted_at"][0, 0, 0, :-1]
    is_causal, is_seen = mask_of(evicted_at)
    figure = Figure(figsize=(7.6, 4.3), layout="constrained")
    lives, counts = figure.subplots(1, 2, width_ratios=(1.1, 1))
    draw_mask(lives, (is_causal.astype(int) + is_seen).T, "one KV head", "step", "key")
    style.style_axes(counts)
    step = np.arange(len(evicted_at))
    counts.step(step, step + 1, where="mid", color=MUTED, lw=1.6, ls="--", label="dense cache")
    n_seen = is_seen.sum(axis=1)
    counts.step(step, n_seen, where="mid", color=BLUE, lw=2.2, label="evicting cache")
    cut = np.flatnonzero(np.diff(n_seen) < 0)
    counts.plot(cut, n_seen[cut] + 2.5, "v", color=VERMILLION, ms=5, label="compaction")
    counts.axhline(CACHE.budget, color=VERMILLION, lw=0.9, label=f"budget {CACHE.budget}")
    ends = np.cumsum([n_prompt, n_turn, n_given, n_turn])
    for axes in (lives, counts):
        for end in range(n_prompt % chunk or chunk, n_prompt, chunk):
            axes.axvline(end - 0.5, color=INK, lw=0.7, ls=":")
        for begin, end, color in zip([0, *ends], ends, (MUTED, PURPLE, GREEN, PURPLE), strict=False):
            band(axes, begin - 0.5, min(end, len(step)) - 0.5, color)
        axes.set_title(axes.get_title("left"), fontsize=10, color=INK, loc="left", pad=14)
    counts.set_title("keys that a query sees", fontsize=10, color=INK, loc="left", pad=14)
    style.label_axes(counts, "step", "")
    counts.legend(fontsize=8.5, loc="upper left", edgecolor="white", framealpha=1)
    color_legend(
        figure,
        "outside upper left",
        n_columns=5,
        prompt=MUTED,
        sampled=PURPLE,
        given=GREEN,
        key_in_the_cache=BLUE,
        evicted=SAND,
    )
    return figure


def band(axes: Axes, begin: float, end: float, color: str) -> None:
    """Draw a coloured band over some steps, above the axes."""
    place = {"transform": axes.get_xaxis_transform(), "clip_on": False, "lw": 0}
    axes.add_patch(Rectangle((begin, 1.015), end - begin, 0.025, color=color, **place))


EQUAL = 1e-8
"""Where the log axis shows an error of 0."""


def exact_replay(model: PreTrainedModel, rollout: Rollout) -> Figure:
    """The two masks of one head, and the error of three learners at each token."""
    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    dense, replay, errors = figure.subplots(1, 3, width_ratios=(1, 1, 1.35))
    n_keys = rollout.input_ids.shape[1] - 1
    is_causal, is_seen = mask_of(rollout.evicted_at[0, 0, 0, :n_keys])
    for axes, seen, title in ((dense, is_causal, "dense mask"), (replay, is_seen, "replay mask, one head")):
        draw_mask(axes, is_causal.astype(int) + seen, title, "key", "query")
    evicted_at = rollout.evicted_at
    is_evicted = (evicted_at > 0) & (evicted_at < NEVER)
    late = rollout.with_record(evicted_at=torch.where(is_evicted, evicted_at + 1, evicted_at))
    learners = {
        "dense learner": (log_ratio(model, rollout, shadow=False), VERMILLION),
        "evictions one query late": (log_ratio(model, late, shadow=True), PURPLE),
        "exact replay": (log_ratio(model, rollout, shadow=True), BLUE),
    }
    style.style_axes(errors)
    scatter = np.random.default_rng(0)
    for place, (name, (gap, color)) in enumerate(learners.items()):
        size = gap.abs().clamp(min=EQUAL).numpy()
        x = np.broadcast_to(np.arange(1, N_NEW + 1), size.shape)
        x = x + 0.25 * (place - 1) + scatter.uniform(-0.1, 0.1, size.shape)
        errors.plot(x.ravel(), size.ravel(), ".", ms=3, mew=0, alpha=0.5, color=color)
        errors.plot([], [], "o", ms=5, color=color, label=f"{name}: {gap.abs().max():.2g} nats at most")
        print(f"  {name}: largest |log π − log μ| {gap.abs().max():.1e} nats")
    errors.set_yscale("log")
    powers = [-6, -4, -2, 0]
    names = ["equal", *(f"$10^{{{power}}}$" for power in powers)]
    errors.set_yticks([EQUAL, *(10.0**power for power in powers)], names)
    errors.yaxis.set_minor_locator(NullLocator())
    style.label_axes(errors, "token of the response", "|log π − log μ|, nats")
    errors.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8.5, borderaxespad=0.2)
    color_legend(figure, "outside lower left", seen=BLUE, evicted=SAND)
    return figure


def recorded_choices(model: PreTrainedModel) -> Figure:
    """Keys, tokens and experts that the sampler chose for one response."""
    rollout = sample(model, 1, record_routing=True, top_k=12, top_p=0.9)
    n_keys = rollout.input_ids.shape[1] - 1
    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    keys, tokens, experts = figure.subplots(1, 3, width_ratios=(1, 1, 1))
    is_causal, is_seen = mask_of(rollout.evicted_at[0, 0, 0, :n_keys])
    draw_mask(keys, (is_causal.astype(int) + is_seen).T, "keys, one head", "query", "key")
    counts = rollout.record.sampling_masks.counts[0, N_PROMPT:].long()
    state = np.ones((VOCAB, N_NEW), int)
    state[rollout.record.sampling_masks.token_ids, torch.arange(N_NEW).repeat_interleave(counts)] = 2
    draw_mask(tokens, state, "tokens, from the vocabulary", "token of the response", "token id")
    state = np.ones((model.config.num_experts, n_keys), int)
    state[rollout.record.expert_ids[0, 0, :, :n_keys], np.arange(n_keys)] = 2
    draw_mask(experts, state, "experts, one layer", "token read", "expert")
    color_legend(figure, "outside upper left", used_by_the_sampler=BLUE, evicted_or_not_chosen=SAND)
    return figure


def distillation() -> Figure:
    """Teacher, student and arrow of both directions, and the anchor."""
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    titles = ("sparse_student, the default", "dense_student, the paper's formula")
    weights = []
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_axis_off()
        axes.set(xlim=(-0.2, 10.6), ylim=(0, 10.4), aspect="equal")
        caption(axes, 0, 10, title, ha="left", fontsize=10.5, weight="bold")
        caption(axes, 2.2, 8.8, "reads all keys", MUTED)
        caption(axes, 8, 8.8, "reads the\nsampler's keys", MUTED)
        config = CONF_DIR / "distillation" / f"{title.split(',')[0]}.yaml"
        weights.append(yaml.safe_load(config.read_text()))
    box(left, (0, 6, 4.4, 1.8), "SFT model, frozen:\nteacher", MUTED)
    box(left, (6, 6, 4.4, 1.8), "policy:\nstudent", BLUE)
    box(left, (0, 0.4, 4.4, 1.8), "policy:\nheld by anchor", BLUE, ink=INK)
    arrow(left, (4.4, 6), (6.9, 6.9), VERMILLION)
    arrow(left, (1.1, 1.1), (6, 2.2), GREEN)
    arrow(left, (8.2, 8.2), (2.2, 3.4))
    caption(left, 8.2, 4.9, f"KL(sg π_dense\n‖ π_shadow)\nweight {weights[0]['weight']}", VERMILLION)
    caption(
        left, 1.4, 4.1, f"anchor: KL\non all keys,\nweight {weights[0]['anchor_weight']}", GREEN, ha="left"
    )
    caption(left, 8.2, 1.3, "policy gradient:\ntrains the\nstudent, too")
    box(right, (0, 6, 4.4, 1.8), "policy:\nstudent", BLUE)
    box(right, (6, 6, 4.4, 1.8), "policy, no gradient:\nteacher", MUTED)
    arrow(right, (6, 4.4), (6.9, 6.9), VERMILLION)
    arrow(right, (8.2, 8.2), (2.2, 5.9))
    caption(right, 2.2, 4.9, f"KL(π_dense\n‖ sg π_shadow)\nweight {weights[1]['weight']}", VERMILLION)
    caption(right, 8.2, 1.3, "policy gradient:\nmoves the teacher")
    return figure


ROLE_PARTS = {
    "reference": ("LM head", "log-probs for the KL"),
    "policy": ("LM head", "samples, log-probs"),
    "value": ("value head", "value of each token"),
    "reward": ("reward head", "score of a response"),
}
"""Head and output of each role."""


def hydra_roles() -> Figure:
    """One frozen backbone under the four roles of `roles=hydra`: which adapter is on, which head reads."""
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-2.2, 18.4), ylim=(-0.2, 9.8), aspect="equal")
    colors = {"policy": BLUE, "value": VERMILLION}
    for place, (role, (head, output)) in enumerate(ROLE_PARTS.items()):
        x, middle = 4.7 * place, 4.7 * place + 2.1
        if adapter := LAYOUTS["hydra"].adapter[role]:
            box(axes, (x, 2.7, 4.2, 1.4), f"LoRA adapter\n{adapter}: on", colors[role])
        else:
            box(axes, (x, 2.7, 4.2, 1.4), "adapters off", MUTED, ink=INK)
        box(axes, (x, 4.9, 4.2, 1.2), head, GREEN if head == "LM head" else MUTED)
        for low, high in ((2.0, 2.7), (4.1, 4.9), (6.1, 6.9)):
            arrow(axes, (middle, middle), (low, high))
        caption(axes, middle, 7.3, output)
        caption(axes, middle, 8.9, role, fontsize=12, weight="bold")
    box(axes, (0, 0.2, 18.3, 1.8), "one frozen backbone, in memory once", INK)
    for y, name in ((8.9, "role"), (7.3, "gives"), (5.5, "head"), (3.4, "adapter"), (1.1, "weights")):
        caption(axes, -0.3, y, name, MUTED, ha="right")
    return figure


def corrections(model: PreTrainedModel, rollout: Rollout) -> Figure:
    """Weight of a token as a function of its ratio, and the ratios of a rollout under both learners."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratio = torch.logspace(-2, 1, 3001)
    is_one = int((ratio - 1).abs().argmin())
    for axes in (left, right):
        style.style_axes(axes)
        axes.set_xscale("log")
        axes.set_xticks([0.01, 0.1, 0.5, 1, 2, 10], ["0.01", "0.1", "0.5", "1", "2", "10"])
        axes.minorticks_off()
    left.plot(ratio, ratio, color=MUTED, lw=1.4, ls=":", label="ρ itself (unbounded)")
    left.axhline(1, color=BLUE, lw=2.2, label="naive: 1 at every ρ")
    for name, color, dashes in (("tis", GREEN, "-"), ("mis", VERMILLION, "-"), ("sparse_rl", PURPLE, "--")):
        found = CORRECTIONS[name](ratio.log()[None], torch.ones(1, len(ratio), dtype=torch.bool))
        weight = found.weight[0] / found.weight[0, is_one]  # sparse_rl normalizes to mean 1 over its batch
        left.plot(ratio, weight, color=color, lw=2.2, ls=dashes, label=name)
    left.plot(1, 1, "o", ms=9, mec=INK, mfc="white", mew=1.8, label="replay: ρ is always 1", zorder=5)
    left.set_ylim(-0.08, 3)
    style.label_axes(left, "ratio ρ = π_old / μ of a token", "weight, in units of that at ρ = 1")
    left.legend(frameon=False, fontsize=8.5, loc="upper left")
    bins = np.logspace(-2.025, 1.025, 62)  # with 1 in the middle of one
    for shadow, name, color in ((False, "dense learner", VERMILLION), (True, "replay", BLUE)):
        found = log_ratio(model, rollout, shadow).exp().flatten()
        share = np.full(len(found), 1 / len(found))
        right.hist(found, bins, weights=share, color=color, alpha=0.8, label=name, log=True)
        outside = ((found < 0.5) | (found > 2)).float().mean()
        print(f"  {name}: {outside:.0%} of the ratios outside of [0.5, 2]")
    right.yaxis.set_major_formatter(style.small_percent)
    right.yaxis.set_minor_locator(NullLocator())
    style.label_axes(right, "ratio ρ of the tokens of one rollout", "share of the tokens")
    right.legend(frameon=False, fontsize=8.5, loc="upper left")
    return figure


def draw(folder: Path) -> list[Path]:
    """Write all pictures into a folder and return their paths."""
    model = tiny_model()
    rollout = sample(model)
    figures = {
        "evicting-cache": evicting_cache(rollout),
        "exact-replay": exact_replay(model, rollout),
        "turns-and-long-prompts": turns(model),
        "recorded-choices": recorded_choices(tiny_mixture()),
        "distillation": distillation(),
        "hydra-roles": hydra_roles(),
        "corrections": corrections(model, rollout),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})
        print(path)
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    draw(parser.parse_args().folder)

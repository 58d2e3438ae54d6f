"""Count the work that the lists and slots of shadow attention leave; no GPU is needed.

    python benchmarks/shadow_work.py [--seq 16384] [--interval 128] [--kv-heads 8] [--record]

Evictions are simulated after h2o. Printed, as a share of the pairs of dense causal attention: pairs of
a query and a key that the sampler saw, the least that any exact kernel computes; pairs in the tiles that the
forward pass and dQ visit; pairs in the tiles that dK and dV visit; and how many slots there are. Beside
them stands the share of these tiles that all queries of their block see, so that no pair need be tested.
"""

import command_line
import record
import torch
from jaxtyping import Int
from kernel_parts.evictions import Schedule, n_visible, simulate_evictions
from text_table import text_table
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import SlotPlan, plan_slots
from lit_rlkv.kernels.shadow_attention.tiles import LARGE

NAME = "shadow_work"
CASES = ((256, 1024), (256, 2048), (256, 4096), (300, 1024), (4096, 1024), (8192, 1024))
"""Prompt and budget; after a prompt of 300 tokens, evictions fall within blocks of queries."""
TILES = LARGE[128]


def count(seq: int, interval: int, n_kv_heads: int, prompt: int, budget: int) -> dict[str, float]:
    """Shares of the dense causal pairs of one sequence and layer."""
    schedule = Schedule(budget, interval=interval, prompt=prompt)
    evicted_at = simulate_evictions((1, 1, n_kv_heads), seq, schedule)
    plan = plan_slots(evicted_at)
    assert plan is not None
    dense = n_kv_heads * seq * (seq + 1) // 2
    pairs, wholly = tile_pairs(evicted_at[0, 0], plan)
    return {
        "prompt": prompt,
        "budget": budget,
        "visible": n_visible(evicted_at) / dense,
        "forward": pairs[0] / dense,
        "key_gradients": pairs[1] / dense,
        "forward_wholly": wholly[0] / pairs[0],
        "key_gradients_wholly": wholly[1] / pairs[1],
        "n_slots": plan.n_slots,
    }


def tile_pairs(
    evicted_at: Int[Tensor, "kv_head seq"], plan: SlotPlan
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Pairs in visited tiles of the lists, and of the slots; and those of them in wholly visible tiles."""
    seq, slot_of = evicted_at.shape[1], plan.slot_of[0, 0].long()
    born, listed, occupied = torch.arange(seq), torch.zeros(2), torch.zeros(2)
    for start in range(0, seq, plan.block):
        lives = (born < start + plan.block) & (evicted_at > torch.maximum(born, torch.tensor(start)))
        is_whole = lives & (born < start) & (evicted_at >= start + plan.block)
        # Keys that all queries of the block see come first in its list.
        n_tiles, n_whole = -(-lives.sum(1) // TILES.forward.keys), is_whole.sum(1) // TILES.forward.keys
        listed += torch.stack([n_tiles.sum(), n_whole.sum()])
        tiles = slot_of // TILES.key_gradients.keys
        n_keys, n_seen = (
            torch.zeros(len(tiles), int(tiles.max()) + 1).scatter_add_(1, tiles, one.float())
            for one in (lives, is_whole)
        )
        occupied += torch.stack([(n_keys > 0).sum(), ((n_keys > 0) & (n_keys == n_seen)).sum()])
    of_list, of_slots = (
        [int(n) * keys * plan.block for n in found]
        for found, keys in ((listed, TILES.forward.keys), (occupied, TILES.key_gradients.keys))
    )
    return (of_list[0], of_slots[0]), (of_list[1], of_slots[1])


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--seq", type=int, default=16_384)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    arguments = parser.parse_args()
    asked = {"seq": arguments.seq, "interval": arguments.interval, "kv_heads": arguments.kv_heads}
    rows = [count(*asked.values(), *case) for case in CASES]
    for row in rows:
        record.append(NAME, asked | row)
    cells = [
        [f"{row['prompt']}, {row['budget']}"]
        + [f"{row[name]:.3f}" for name in ("visible", "forward", "forward_wholly")]
        + [f"{row[name]:.3f}" for name in ("key_gradients", "key_gradients_wholly")]
        + [f"{row['n_slots']}"]
        for row in rows
    ]
    headings = ["prompt, budget", "pairs visible", "forward, dQ", "wholly", "dK and dV", "wholly", "slots"]
    print(text_table(headings, cells))


if __name__ == "__main__":
    main()

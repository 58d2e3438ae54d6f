"""Count the work that the lists and slots of shadow attention leave; no GPU is needed.

    python benchmarks/shadow_work.py [--seq 16384] [--interval 128] [--kv-heads 8]

Evictions are simulated after h2o. Printed, as a share of the pairs of dense causal attention: pairs of
a query and a key that the sampler saw, the least that any exact kernel computes; pairs in the tiles that the
forward pass and dQ visit; pairs in the tiles that dK and dV visit; and how many slots there are.
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

CASES = ((256, 1024), (256, 2048), (256, 4096), (4096, 1024), (8192, 1024))
"""Prompt and budget."""
TILES = LARGE[128]


def count(seq: int, interval: int, n_kv_heads: int, prompt: int, budget: int) -> dict[str, float]:
    """Shares of the dense causal pairs of one sequence and layer."""
    schedule = Schedule(budget, interval=interval, prompt=prompt)
    evicted_at = simulate_evictions((1, 1, n_kv_heads), seq, schedule)
    plan = plan_slots(evicted_at)
    assert plan is not None
    dense = n_kv_heads * seq * (seq + 1) // 2
    listed, occupied = tile_pairs(evicted_at[0, 0], plan)
    return {
        "prompt": prompt,
        "budget": budget,
        "visible": n_visible(evicted_at) / dense,
        "forward": listed / dense,
        "key_gradients": occupied / dense,
        "n_slots": plan.n_slots,
    }


def tile_pairs(evicted_at: Int[Tensor, "kv_head seq"], plan: SlotPlan) -> tuple[int, int]:
    """Pairs in visited tiles of the lists, and of the slots."""
    seq, slot_of = evicted_at.shape[1], plan.slot_of[0, 0].long()
    born = torch.arange(seq)
    listed = occupied = 0
    for start in range(0, seq, plan.block):
        lives = (born < start + plan.block) & (evicted_at > torch.maximum(born, torch.tensor(start)))
        n_tiles = -(-lives.sum(1) // TILES.forward.keys)
        listed += int(n_tiles.sum()) * TILES.forward.keys * plan.block
        tiles = torch.where(lives, slot_of // TILES.key_gradients.keys, -1)
        occupied += sum(len(row[row >= 0].unique()) for row in tiles) * TILES.key_gradients.keys * plan.block
    return listed, occupied


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--seq", type=int, default=16_384)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    arguments = parser.parse_args()
    rows = [count(arguments.seq, arguments.interval, arguments.kv_heads, *case) for case in CASES]
    for row in rows:
        record.append("shadow_work", vars(arguments) | row)
    cells = [
        [f"{row['prompt']}, {row['budget']}"]
        + [f"{row[name]:.3f}" for name in ("visible", "forward", "key_gradients")]
        + [f"{row['n_slots']}"]
        for row in rows
    ]
    print(text_table(["prompt, budget", "pairs visible", "forward, dQ", "dK and dV", "slots"], cells))


if __name__ == "__main__":
    main()

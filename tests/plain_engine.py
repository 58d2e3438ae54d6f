"""Another engine: a decode loop in plain torch on the weights of a Llama, which evicts keys and logs it.

It shares nothing with the package: own attention over own lists of keys, own policies, own schedules.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

BUDGET, SINKS, LATEST, EVERY, TEMPERATURE = 8, 1, 2, 3, 0.8


@dataclass
class Log:
    """All that the engine knows of a sequence; tables are [layer, kv_head, ...]."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    deaths: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Position of the first query that no longer saw (layer, head, key)."""
    kept: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Position of the next query, positions and ordinals of the kept keys, in the order of their scores."""
    slots: list[Tensor] = field(default_factory=list)
    """Slot that each token took, from the first that found the cache full."""


class Engine:
    """Decodes one sequence at a time.

    Args:
        policy: attention, the least attended go; window, the oldest but for sinks; random.
        overwrites: each token takes the slot of another one once the cache is full; else every `EVERY` tokens
            a cache above its budget is compacted.
    """

    def __init__(self, model: LlamaForCausalLM, policy: str, *, overwrites: bool, seed: int = 0) -> None:
        self.model, self.policy, self.overwrites = model, policy, overwrites
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def run(self, prompt: list[int], n_new: int) -> Log:
        log, config = Log(prompt), self.model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads, 0)
        dim = config.hidden_size // config.num_attention_heads
        self.keys = [torch.zeros(*shape[1:], dim, dtype=self.model.dtype) for _ in range(shape[0])]
        self.values = [each.clone() for each in self.keys]
        self.positions = torch.zeros(shape, dtype=torch.long)
        self.mass = torch.zeros(shape, dtype=self.model.dtype)
        for position in range(len(prompt) + n_new - 1):
            sequence = prompt + log.response
            logits = self.forward(sequence[position], position, log) / TEMPERATURE
            if position >= len(prompt) - 1:
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=self.generator))
                log.response.append(token)
                log.logps.append(float(logits.log_softmax(-1)[token]))
            if not self.overwrites and (position + 1) % EVERY == 0 and self.positions.shape[2] > BUDGET:
                self.compact(position + 1, log)
        return log

    def forward(self, token: int, position: int, log: Log) -> Tensor:
        body = self.model.model
        is_full = self.overwrites and self.positions.shape[2] == BUDGET
        slots = self.worst(1, position)[..., 0] if is_full else None
        if slots is None:
            new = torch.full((*self.positions.shape[:2], 1), position)
            self.positions = torch.cat([self.positions, new], dim=2)
            self.mass = torch.cat([self.mass, torch.zeros(new.shape, dtype=self.mass.dtype)], dim=2)
        else:
            log.slots.append(slots)
            self.bury(self.positions.gather(2, slots[..., None]), position, log)
            self.positions.scatter_(2, slots[..., None], position)
            self.mass.scatter_(2, slots[..., None], 0.0)
        hidden = body.embed_tokens.weight[token]
        cos, sin = (each[0, 0] for each in body.rotary_emb(hidden[None, None], torch.tensor([[position]])))
        for number, layer in enumerate(body.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            dim = cos.shape[0]
            query, key, value = (
                projection(normed).view(-1, dim)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = (each * cos + rotate_half(each) * sin for each in (query, key))
            heads = torch.arange(len(key))
            for pools, each in ((self.keys, key), (self.values, value)):
                if slots is None:
                    pools[number] = torch.cat([pools[number], each[:, None]], dim=1)
                else:
                    pools[number][heads, slots[number]] = each
            grouped = query.view(len(key), -1, dim)
            probs = (grouped @ self.keys[number].mT * dim**-0.5).softmax(-1)
            self.mass[number] += probs.mean(dim=1)
            hidden = hidden + attention.o_proj((probs @ self.values[number]).flatten())
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(body.norm(hidden))

    def worst(self, n: int, now: int) -> Tensor:
        """Return the places of the keys to evict, [layer, head, n], never sinks nor the latest."""
        score = {
            "attention": self.mass.clone(),
            "window": self.positions.to(self.mass.dtype),
            "random": torch.rand(self.mass.shape, generator=self.generator, dtype=self.mass.dtype),
        }[self.policy]
        is_safe = (self.positions < SINKS) | (self.positions >= now - LATEST)
        return score.masked_fill(is_safe, torch.inf).topk(n, dim=2, largest=False).indices

    def compact(self, now: int, log: Log) -> None:
        n = self.positions.shape[2]
        gone = self.worst(n - BUDGET, now)
        self.bury(self.positions.gather(2, gone), now, log)
        is_kept = torch.ones(self.positions.shape, dtype=torch.bool).scatter(2, gone, False)
        order = torch.rand(is_kept.shape, generator=self.generator).masked_fill(~is_kept, -1.0)
        kept = order.topk(BUDGET, dim=2).indices  # engines do not sort
        self.positions, self.mass = self.positions.gather(2, kept), self.mass.gather(2, kept)
        log.kept.append((now, self.positions, kept))
        for pools in (self.keys, self.values):
            for number, pool in enumerate(pools):
                pools[number] = pool.gather(1, kept[number, :, :, None].expand(-1, -1, pool.shape[-1]))

    def bury(self, gone: Tensor, now: int, log: Log) -> None:
        for layer, heads in enumerate(gone.tolist()):
            for head, keys in enumerate(heads):
                log.deaths |= {(layer, head, key): now for key in keys}

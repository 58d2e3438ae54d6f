"""Expert routing: record the experts that a model's routers choose, or have them take recorded ones.

A router is a module that chooses k of n experts for each token by one top-k over [token, expert]. Only the
result of that top-k is replaced: the weights come from the router's own logits by the family's own formula,
and gradients flow. This is rollout routing replay, R3 (arXiv:2510.11370).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lit_rlkv.models.lm_head import model_body
from lit_rlkv.types import OWN_CHOICE, Record

PROBE_LEN = 6
MOST_INT8_EXPERTS = 128


class Router:
    """A module that chooses `k` of `n_experts` experts for each token, in the order of their scores or not.

    Args:
        module: calls `topk` once over [token, n_experts], and before that at most over groups of experts.
    """

    def __init__(self, module: nn.Module, n_experts: int, k: int) -> None:
        self.module = module
        self.n_experts = n_experts
        self.k = k
        self.given: Int[Tensor, "token expert"] | None = None
        """Experts to take; `OWN_CHOICE` leaves the choice to the router."""
        self.chosen: Int[Tensor, "token expert"] | None = None
        """Experts of the latest forward."""
        # One function for the life of the router, because a compiled layer is compiled anew for another.
        self._forward = torch.compiler.disable(self._watched)  # type: ignore[no-untyped-call]

    @contextmanager
    def watched(self, given: Int[Tensor, "token expert"] | None) -> Iterator[None]:
        """Within this block forwards of the module take these experts, and note what they choose."""
        self.given, self.chosen = given, None
        self.module.forward = self._forward
        try:
            yield
        finally:
            vars(self.module).pop("forward", None)  # the method of the class again
            self.given = None

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        with _TopK(self._top_k):
            return type(self.module).forward(self.module, *args, **kwargs)

    def _top_k(self, scores: Tensor, k: int, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if scores.shape[1] == self.n_experts:
            self.chosen = found[1]
            if self.given is None:
                return found
            given = self.given[:, :k].long()
            self.chosen = torch.where(given == OWN_CHOICE, found[1], given)
        elif self.given is not None and self.n_experts % scores.shape[1] == 0:
            # Groups whose experts alone can be chosen: those of the given experts, then by score.
            given = self.given[:, : self.k].long()
            groups = given.clamp(min=0) // (self.n_experts // scores.shape[1])
            is_given = torch.zeros_like(scores, dtype=torch.bool).scatter(1, groups, given != OWN_CHOICE)
            indices = scores.masked_fill(is_given, torch.inf).topk(k, dim=1).indices
            return scores.gather(1, indices), indices
        else:
            return found
        return scores.gather(1, self.chosen), self.chosen


class _TopK(TorchFunctionMode):
    """Within this block every top-k of each row of a matrix goes through `change`.

    Args:
        change: takes the matrix, k, and values and indices; returns values and indices.
    """

    def __init__(self, change: Callable[[Tensor, int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, k, dim = _top_k_arguments(*args, **kwargs)
        if scores.ndim != 2 or dim not in (-1, 1):
            return found
        return torch.return_types.topk(self.change(scores, k, found))


def _top_k_arguments(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, int, int]:
    return input, k, dim


_ROUTERS: WeakKeyDictionary[PreTrainedModel, list[Router]] = WeakKeyDictionary()
_GIVEN: WeakKeyDictionary[PreTrainedModel, Int[Tensor, "router token expert"]] = WeakKeyDictionary()
"""Experts that the routers of a model take now."""


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Return the routers of a model from `prepare_backbone`, in the order in which they run.

    They are found, and checked, by forwards of a few tokens at the first call for a model.

    Raises:
        ValueError: the model has no routers, or their choice cannot be replaced.
    """
    if model not in _ROUTERS:
        was_training = model.training
        try:
            _ROUTERS[model] = _found_routers(model.eval())
        finally:
            model.train(was_training)
    return _ROUTERS[model]


def expert_dtype(routers: Sequence[Router]) -> torch.dtype:
    """Return the smallest dtype for expert ids: int8 for up to 128 experts, else int16."""
    return torch.int8 if max(r.n_experts for r in routers) <= MOST_INT8_EXPERTS else torch.int16


@contextmanager
def recorded_experts(routers: Sequence[Router]) -> Iterator[Callable[[], Int[Tensor, "router token expert"]]]:
    """Yield a function that returns the experts that the latest forward within this block has chosen.

    Routers that choose fewer experts than others have `OWN_CHOICE` after them.
    """
    width = max(router.k for router in routers)

    def read() -> Tensor:
        found: list[Tensor] = []
        for router in routers:
            assert router.chosen is not None, "the forward went through all routers when they were found"
            experts = router.chosen.to(expert_dtype(routers))
            found.append(nn.functional.pad(experts, (0, width - router.k), value=OWN_CHOICE))
        return torch.stack(found)

    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(router.watched(None))
        yield read


@contextmanager
def replayed_experts(
    model: PreTrainedModel, given: Int[Tensor, "router token expert"] | None
) -> Iterator[None]:
    """Within this block the routers of a model take these experts; None leaves the model alone.

    Raises:
        ValueError: the model has no routers, or `given` is for another number of layers or more experts.
    """
    if given is None:
        yield
        return
    routers = routers_of(model)
    if len(routers) != len(given):
        raise ValueError(
            f"expert_ids must be for the {len(routers)} routers of {type(model).__name__}, got "
            f"{len(given)} layers; replay a rollout with a model of the same architecture"
        )
    with ExitStack() as stack:
        for router, experts in zip(routers, given, strict=True):
            stack.enter_context(router.watched(experts))
        _GIVEN[model] = given
        stack.callback(_GIVEN.pop, model)
        yield


def replayed_routing(model: PreTrainedModel, record: Record | None) -> AbstractContextManager[None]:
    """Within this block the routers take the experts of a record, if it has any; see `replayed_experts`."""
    experts = None if record is None else record.expert_ids
    return replayed_experts(model, None if experts is None else by_token(experts))


def by_token(expert_ids: Int[Tensor, "batch router expert seq"]) -> Int[Tensor, "router token expert"]:
    """Return the experts of a batch as the routers see its tokens: row after row."""
    return expert_ids.permute(1, 0, 3, 2).flatten(1, 2)


def by_row(
    experts: Int[Tensor, "router token expert"], n_rows: int
) -> Int[Tensor, "batch router expert seq"]:
    """Return the experts of tokens, row after row, as those of a batch."""
    return experts.unflatten(1, (n_rows, -1)).permute(1, 0, 3, 2)  # type: ignore[no-untyped-call]


def given_experts(model: PreTrainedModel) -> Int[Tensor, "router token expert"] | None:
    """Return the experts that the routers take now, so that a recomputed layer can take them again."""
    return _GIVEN.get(model)


@torch.no_grad()
def _found_routers(model: PreTrainedModel) -> list[Router]:
    name, vocab_size = type(model).__name__, model.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(2 * PROBE_LEN, device=model.device).view(2, PROBE_LEN) % vocab_size

    def hidden() -> Tensor:
        states: Tensor = model_body(model)(input_ids, use_cache=False).last_hidden_state
        return states

    running: list[nn.Module] = []
    calls: dict[nn.Module, list[tuple[int, int]]] = {}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    def note(scores: Tensor, k: int, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if len(scores) == input_ids.numel():
            calls.setdefault(running[-1], []).append((scores.shape[1], k))
        return found

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        with _TopK(note):
            expected = hidden()
    # The last call chooses the experts; calls before it choose groups of them.
    routers = [Router(module, *mine[-1]) for module, mine in calls.items()]
    if not routers:
        raise ValueError(
            f"{name} has no routing to replay: no module chooses experts by a top-k over [token, expert], so "
            "it is dense or routes in another way; leave replay_routing off"
        )
    for router in routers:
        n_calls = calls[router.module].count((router.n_experts, router.k))
        if n_calls > 1:
            raise ValueError(
                f"the routing of {name} cannot be replayed: its {type(router.module).__name__} chooses "
                f"{n_calls} times in a forward; leave replay_routing off"
            )
    with recorded_experts(routers) as read:
        hidden()
        chosen = read()

    def error(given: Tensor) -> float:
        with ExitStack() as stack:
            for router, experts in zip(routers, given, strict=True):
                stack.enter_context(router.watched(experts))
            return float((hidden() - expected).abs().max())

    n_experts = torch.tensor([router.n_experts for router in routers], device=chosen.device)
    others = torch.where(chosen == OWN_CHOICE, chosen, (chosen.long() + 1) % n_experts[:, None, None])
    # Kernels that sum the experts in any order give the same only up to rounding.
    if not 10 * error(chosen) < error(others):
        raise ValueError(
            f"the routing of {name} cannot be replayed: it does not compute the same with the experts that "
            "it chose, and something else with others; leave replay_routing off"
        )
    return routers

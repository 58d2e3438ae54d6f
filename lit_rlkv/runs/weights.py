"""Parameters that checkpoints hold: gathered from the modules of a run, and copied back into them."""

from collections.abc import Mapping

from torch import Tensor, nn

from lit_rlkv.config import ConfigError
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import gather_full, shard_like
from lit_rlkv.models.hydra import Roles


def trainable_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name, sharded ones gathered on rank 0.

    Every rank must call it. The frozen backbone is saved once, elsewhere.
    """
    return _gathered(_parameters(module, trained=True))


def reference_weights(roles: Roles) -> dict[str, Tensor]:
    """Return the reference's parameters as `trainable_weights`; empty while it is the starting model."""
    if not roles.reference_is_synced:
        return {}
    return _gathered(_parameters(roles.backbone("reference"), trained=False))


def load_trainable(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into the trained parameters of a module.

    Raises:
        ConfigError: names or shapes differ.
    """
    _load(_parameters(module, trained=True), weights, "trained parameters")


def load_reference(roles: Roles, weights: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into the reference; do nothing without any, or if no role is the reference.

    Raises:
        ConfigError: names or shapes differ.
    """
    if weights and "reference" in roles.needed:
        _load(_parameters(roles.backbone("reference"), trained=False), weights, "reference")
        roles.reference_is_synced = True


def _parameters(module: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    FORWARD_COORDINATOR.wait()  # those of a gathered layer are copies, and writes to them would be lost
    return {name: one for name, one in module.named_parameters() if one.requires_grad == trained}


def _gathered(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: gather_full(parameter.detach()) for name, parameter in parameters.items()}


def _load(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], name_of_all: str) -> None:
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise ConfigError(
            f"the checkpoint must hold this model's {name_of_all}, but {len(odd)} differ, such as "
            f"{odd[0]}; give the roles that it was trained with"
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ConfigError(
                f"{name} has shape {tuple(weights[name].shape)} in the checkpoint but "
                f"{tuple(parameter.shape)} here; give the model and the roles.rank that it was trained with"
            )
        parameter.data.copy_(shard_like(weights[name], parameter))

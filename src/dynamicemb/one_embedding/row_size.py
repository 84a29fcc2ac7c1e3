"""How many floats a row has: those of the embedding, and those of the optimizer's state."""

from __future__ import annotations

from dynamicemb.errors import InvalidArgumentError, wrong_value
from dynamicemb.one_embedding.stores import StoreOptions
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind

#: The optimizer that a size means until one steps. Others of the same size can take its place.
_KINDS = (
    OptimizerKind.SGD,
    OptimizerKind.MOMENTUM,
    OptimizerKind.ADAM,
    OptimizerKind.SMART_DECAY_ADAM,
)
_USERS = {
    OptimizerKind.SGD: "SGD",
    OptimizerKind.MOMENTUM: "SGD with momentum, Adagrad",
    OptimizerKind.ADAM: "Adam, AdamW, Ftrl",
    OptimizerKind.SMART_DECAY_ADAM: "SmartDecayAdam",
}
#: The optimizers of an embedding, by the names that ``load_snapshot(optimizer=...)`` takes.
NAMES = {
    OptimizerKind.SGD: "sgd",
    OptimizerKind.MOMENTUM: "momentum_sgd",
    OptimizerKind.ADAGRAD: "exact_adagrad",
    OptimizerKind.ADAM: "adam",
    OptimizerKind.FTRL: "ftrl",
    OptimizerKind.SMART_DECAY_ADAM: "smart_decay_adam",
}


def names_of_size(storage_dim: int, dim: int) -> list[str]:
    """The optimizers that update rows of ``storage_dim`` floats."""
    return [name for kind, name in NAMES.items() if row_size(kind, dim) == storage_dim]


def row_size(kind: OptimizerKind, dim: int) -> int:
    """Floats of a row that an optimizer of this kind updates."""
    return dim + Optimizer(kind, OptimizerArgs()).state_dim(dim)


def first_optimizer(options: StoreOptions, dim: int) -> Optimizer:
    """An optimizer whose rows have the size that the options say."""
    size = options.storage_dim if options.storage_dim != -1 else options.size_factor * dim
    for kind in _KINDS:
        if row_size(kind, dim) == size:
            return Optimizer(kind, OptimizerArgs())
    sizes = "; ".join(f"{row_size(kind, dim)} for {_USERS[kind]}" for kind in _KINDS)
    if options.storage_dim != -1:
        raise wrong_value("storage_dim", size, f"with embedding_dim {dim}: {sizes}")
    raise wrong_value(
        "size_factor", options.size_factor, f"1, 2 or 3; or a storage_dim. In floats: {sizes}"
    )


def check_row_size(optimizer: Optimizer, storage_dim: int, dim: int, name: str) -> None:
    """Raise unless rows of ``storage_dim`` floats are what ``optimizer`` updates."""
    needed = row_size(optimizer.kind, dim)
    if needed == storage_dim:
        return
    said = f"storage_dim={needed}"
    if needed % dim == 0:
        said = f"size_factor={needed // dim} (or {said})"
    raise InvalidArgumentError(
        f"the rows of embedding {name!r} have {storage_dim} floats, {optimizer.kind.name} needs "
        f"{needed}: make the store options with {said}"
    )

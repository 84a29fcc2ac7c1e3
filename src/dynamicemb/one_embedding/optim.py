"""Optimizers of rows (and of dense parameters beside them) in the form of ``torch.optim``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynamicemb.errors import InvalidArgumentError, check_number, wrong_type, wrong_value
from dynamicemb.nn import torch_optim
from dynamicemb.one_embedding.embedding import Embedding
from dynamicemb.optimizers import Optimizer as RowOptimizer
from dynamicemb.optimizers import OptimizerArgs, OptimizerKind, WeightDecayMode

Closure = Callable[[], Any]


class _RowsAndDense(torch.optim.Optimizer, ABC):
    """The rows of embeddings are updated around :meth:`step` (see ``nn.torch_optim``), which is
    about dense parameters alone."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """One step of a dense parameter."""


class Ftrl(_RowsAndDense):
    """FTRL-Proximal (McMahan et al., 2013).

    With ``n`` the sum of squared gradients: ``sigma = (sqrt(n + g*g) - sqrt(n)) / lr``, ``z += g -
    sigma w``, ``w = 0`` where ``|z| <= lambda1``, else ``-(z - sign(z) lambda1) / ((beta + sqrt(n))
    / lr + lambda2)``.

    Args:
        params: as for every ``torch.optim`` optimizer.
        lr: learning rate, more than 0.
        weight_decay: added to the gradient as ``weight_decay * w``.
        lr_power: only -0.5: the square root above.
        initial_accumulator_value: where ``n`` starts; ``z`` starts at 0.
        lambda1, lambda2: L1 and L2 strength.
        beta: the constant of the rate.

    Rows need ``size_factor=3``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        defaults = {
            "lr": check_number("lr", lr, above=0.0),
            "weight_decay": weight_decay,
            "lr_power": check_number("lr_power", lr_power),
            "initial_accumulator_value": initial_accumulator_value,
            "lambda1": lambda1,
            "lambda2": lambda2,
            "beta": beta,
        }
        _ftrl(defaults)  # checks the numbers
        super().__init__(params, defaults)

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        if not state:
            state["z"] = torch.zeros_like(parameter)
            state["n"] = torch.full_like(parameter, group["initial_accumulator_value"])
        z, n, lr = state["z"], state["n"], group["lr"]
        gradient = gradient + group["weight_decay"] * parameter
        before = n.sqrt()
        n.add_(gradient * gradient)
        after = n.sqrt()
        z.add_(gradient - (after - before) / lr * parameter)
        shrunk = z.sign() * (z.abs() - group["lambda1"]).clamp_(min=0.0)
        parameter.copy_(-shrunk / ((group["beta"] + after) / lr + group["lambda2"]))


def _ftrl(group: dict[str, Any]) -> RowOptimizer:
    if group["lr_power"] != -0.5:
        raise wrong_value("lr_power", group["lr_power"], "-0.5, the square root of the sum")
    args = OptimizerArgs(
        learning_rate=float(group["lr"]),
        weight_decay=group["weight_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
        lambda1=group["lambda1"],
        lambda2=group["lambda2"],
        beta=group["beta"],
    )
    return RowOptimizer(OptimizerKind.FTRL, args)


class SmartDecayAdam(_RowsAndDense):
    """Adam for rows that are seldom seen: what the moments of a row would have done in the steps
    that it had no part in is made up for when it comes again.

    With ``k`` steps since the last: ``u = m beta1 (1 - beta1**(k-1)) / (1 - beta1)``,
    ``m = beta1**k m + (1 - beta1) g``, ``v = beta2**k v + (1 - beta2) g*g``,
    ``w -= lr (m + u) / (sqrt(v) + eps)``, and ``weight_decay`` takes ``lr weight_decay w`` away as
    well. Without bias correction. A dense parameter has a part in every step.

    Rows need ``storage_dim=3 * embedding_dim + 2``, one more where ``embedding_dim`` is odd. On the
    CPU only.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _smart_decay_adam(defaults)  # checks the numbers
        super().__init__(params, defaults)

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        if not state:
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.zeros_like(parameter)
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(state["m"], state["v"].sqrt() + group["eps"], value=-lr)


def _smart_decay_adam(group: dict[str, Any]) -> RowOptimizer:
    beta1, beta2 = group["betas"]
    args = OptimizerArgs(
        learning_rate=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
    return RowOptimizer(OptimizerKind.SMART_DECAY_ADAM, args)


class SGD(torch.optim.SGD):
    """``torch.optim.SGD`` whose ``weight_decay`` acts on rows as OneFlow's: decoupled from the
    gradient, ``lr weight_decay w`` less in every step, so that momentum has no part in it.

    Dense parameters are updated as by ``torch.optim.SGD``. Rows need ``size_factor=1``, 2 with
    momentum.
    """


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` whose ``weight_decay`` acts on rows as OneFlow's: decoupled from the
    gradient, ``lr weight_decay w`` less in every step, as in ``torch.optim.AdamW``.

    Dense parameters are updated as by ``torch.optim.Adam``. Rows need ``size_factor=3``.
    """


class Adagrad(torch.optim.Adagrad):
    """``torch.optim.Adagrad`` whose ``weight_decay`` acts on rows as OneFlow's: decoupled from the
    gradient, ``lr weight_decay w`` less in every step, with ``lr`` after ``lr_decay``.

    Dense parameters are updated as by ``torch.optim.Adagrad``. Rows need ``size_factor=2``.
    """


def _decoupled(kind: type[torch.optim.Optimizer]) -> torch_optim.Translation:
    """The translation of torch's optimizers of class ``kind``, with decoupled weight decay."""
    as_torch = torch_optim.translation_of(kind)

    def translation(group: dict[str, Any]) -> RowOptimizer:
        rows = as_torch(group)
        mode = WeightDecayMode.DECOUPLE.value
        return RowOptimizer(rows.kind, replace(rows.args, weight_decay_mode=mode))

    return translation


torch_optim.register(Ftrl, _ftrl)
torch_optim.register(SmartDecayAdam, _smart_decay_adam)
torch_optim.register(SGD, _decoupled(torch.optim.SGD))
torch_optim.register(Adam, _decoupled(torch.optim.Adam))
torch_optim.register(Adagrad, _decoupled(torch.optim.Adagrad))


class Optimizer:
    """An optimizer that updates embeddings, checked when it is made.

    ``optimizer``: a ``torch.optim`` SGD, Adam, AdamW or Adagrad, or a :class:`SGD`, :class:`Adam`,
    :class:`Adagrad`, :class:`Ftrl` or :class:`SmartDecayAdam` of this package, over parameters that
    include those of every one of ``embeddings``. It does the same without this class; what this
    adds is that a row size that does not fit the optimizer is an error here and not at the first
    step. Everything else (``zero_grad``, ``param_groups``, ``state_dict``, ...) is that of
    ``optimizer``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, embeddings: Sequence[Embedding]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise wrong_type("optimizer", optimizer, "a torch.optim optimizer")
        if not isinstance(embeddings, (list, tuple)) or not all(
            isinstance(one, Embedding) for one in embeddings
        ):
            raise wrong_type("embeddings", embeddings, "a list of MultiTableEmbedding")
        groups = {
            id(parameter): group
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for embedding in embeddings:
            group = groups.get(id(embedding.shadow))
            if group is None:
                raise InvalidArgumentError(
                    f"the parameters of embedding {embedding.embedding_name!r} are not among those "
                    "of the optimizer; allowed: an optimizer over embedding.parameters()"
                )
            embedding.check_optimizer(torch_optim.translate(optimizer, group))
        self.optimizer = optimizer
        self.embeddings = list(embeddings)

    def step(self, closure: Closure | None = None) -> Any:
        """Update dense parameters and rows."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the wrapped optimizer; rows forget their gradients with it."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

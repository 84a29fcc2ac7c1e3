"""TorchRec on a GPU where only fbgemm-gpu-cpu is at hand: stand-ins for FBGEMM's CUDA kernels.

For tests alone, and slow. Operations of FBGEMM that have a CPU kernel and no CUDA kernel copy their
tensors to main memory and back; lookups in tables with a fused optimizer are done with torch. What
is tested then is the code around them, on CUDA tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import fbgemm_gpu  # noqa: F401  loads the operations
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from torch.utils import _pytree as pytree

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_library: Any = None
#: The marks of tests that need a GPU and TorchRec on it.
only_on_a_gpu = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("on_one_gpu"),
]


@pytest.fixture
def on_one_gpu() -> Iterator[None]:
    """A process group of this process alone, with a GPU."""
    install()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def install() -> None:
    """Put the stand-ins in place, where FBGEMM has no CUDA kernels."""
    global _library
    if _library is not None or not _lacks("fbgemm::asynchronous_complete_cumsum"):
        return
    _library = torch.library.Library("fbgemm", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("fbgemm::") and _lacks(name):
            _library.impl(name, functools.partial(_through_main_memory, name), "CUDA")
    for kind in KINDS:
        module = getattr(invokers, f"lookup_{kind}")
        module.invoke = lookup(kind, module.invoke)


def _lacks(name: str) -> bool:
    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    implicit = has("CompositeImplicitAutograd") or has("CompositeExplicitAutograd")
    return has("CPU") and not has("CUDA") and not implicit


def _through_main_memory(name: str, *args: Any, **kwargs: Any) -> Any:
    """The operation on copies in main memory; arguments that it writes to are copied back."""
    packet, _, overload = name.removeprefix("fbgemm::").partition(".")
    operation = getattr(getattr(torch.ops.fbgemm, packet), overload or "default")
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    device = next(one.device for one in tensors if one.device.type != "cpu")
    here_args, here_kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), (args, kwargs))
    out = operation(*here_args, **here_kwargs)
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            copy = here_args[place] if place < len(args) else here_kwargs.get(argument.name)
            if isinstance(given, torch.Tensor):
                given.copy_(copy)
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), out)


def lookup(kind: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """FBGEMM's invoke of a lookup with an optimizer; ``original`` looks up in main memory, if it is
    given."""

    def invoke(*args: Any, **kwargs: Any) -> Any:
        names = ("common_args", "optimizer_args", *(() if kind == "sgd" else ("momentum1",)))
        names += ("momentum2", "iter") if kind == "adam" else ("iter",)
        given = dict(zip(names, args, strict=False)) | kwargs
        common = given["common_args"]
        if original is not None and not common.dev_weights.is_cuda:
            return original(*args, **kwargs)
        weights = common.dev_weights if common.dev_weights.numel() else common.host_weights
        return _Lookup.apply(common.placeholder_autograd_tensor, weights, kind, given)

    return invoke


def _flat(momentum: Any) -> torch.Tensor:
    return momentum.dev if momentum.dev.numel() else momentum.host  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """Looks up, and in backward updates the rows. The first argument is there for autograd."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, weights: torch.Tensor, kind: str, given: dict[str, Any]
    ) -> torch.Tensor:
        common = given["common_args"]
        assert common.output_dtype == 0, "only float32 outputs"
        ctx.weights, ctx.kind, ctx.given = weights.detach(), kind, given
        features = len(common.D_offsets) - 1
        bags = (len(common.offsets) - 1) // features
        bounds = common.offsets.tolist()
        columns = common.D_offsets.tolist()
        begins = common.weights_offsets.tolist()
        ctx.parts = []
        pooled = common.pooling_mode != 2
        rows_out = bags if pooled else len(common.indices)
        out = weights.new_zeros(rows_out, common.total_D if pooled else common.max_D)
        for t in range(features):
            first, last = bounds[t * bags], bounds[(t + 1) * bags]
            ids = common.indices[first:last].to(torch.int64)
            dim = columns[t + 1] - columns[t]
            places = begins[t] + ids[:, None] * dim + torch.arange(dim, device=ids.device)
            rows = ctx.weights[places]
            if not pooled:
                out[first:last, :dim] = rows
                ctx.parts.append((ids, dim, None, None, first, last))
                continue
            lengths = common.offsets[t * bags : (t + 1) * bags + 1].to(torch.int64).diff()
            bag = torch.repeat_interleave(torch.arange(bags, device=ids.device), lengths)
            scale = torch.ones(len(ids), device=ids.device)
            if common.indice_weights is not None:
                scale = common.indice_weights[first:last]
            if common.pooling_mode == 1:
                scale = scale / lengths.clamp(min=1)[bag]
            out[:, columns[t] : columns[t + 1]].index_add_(0, bag, rows * scale[:, None])
            ctx.parts.append((ids, dim, bag, scale, columns[t], columns[t + 1]))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        begins = ctx.given["common_args"].weights_offsets.tolist()
        tables: dict[int, list[tuple[int, Any, Any]]] = {}  # features of a table together
        for t, (ids, dim, bag, scale, first, last) in enumerate(ctx.parts):
            if bag is None:
                of_ids = gradient[first:last, :dim]
            else:
                of_ids = gradient[:, first:last][bag] * scale[:, None]
            tables.setdefault(begins[t], []).append((t, ids, of_ids))
        for begin, features in tables.items():
            ids = torch.cat([one[1] for one in features])
            of_ids = torch.cat([one[2] for one in features])
            unique, inverse = torch.unique(ids, return_inverse=True)
            total = of_ids.new_zeros(len(unique), of_ids.shape[1]).index_add_(0, inverse, of_ids)
            _update(ctx.weights, ctx.kind, ctx.given, begin, features[0][0], unique, total)
        return None, None, None, None


def _update(
    weights: torch.Tensor,
    kind: str,
    given: dict[str, Any],
    begin: int,
    feature: int,
    ids: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """One step of the optimizer on the rows of distinct ids."""
    options = given["optimizer_args"]
    rate = float(given["common_args"].learning_rate_tensor)
    dim = gradient.shape[1]
    columns = torch.arange(dim, device=ids.device)
    places = begin + ids[:, None] * dim + columns
    if kind == "sgd":
        weights[places] -= rate * gradient
        return
    first, start = _flat(given["momentum1"]), int(given["momentum1"].offsets[feature])
    if kind == "rowwise_adagrad":
        first[start + ids] += (gradient**2).mean(1)
        weights[places] -= rate * gradient / (first[start + ids].sqrt()[:, None] + options.eps)
        return
    whole = start + ids[:, None] * dim + columns
    if kind == "adagrad":
        first[whole] += gradient**2
        weights[places] -= rate * gradient / (first[whole].sqrt() + options.eps)
        return
    second, start = _flat(given["momentum2"]), int(given["momentum2"].offsets[feature])
    other = start + ids[:, None] * dim + columns
    step = int(given["iter"])
    first[whole] = options.beta1 * first[whole] + (1 - options.beta1) * gradient
    second[other] = options.beta2 * second[other] + (1 - options.beta2) * gradient**2
    m = first[whole] / (1 - options.beta1**step)
    v = second[other] / (1 - options.beta2**step)
    weights[places] -= rate * m / (v.sqrt() + options.eps)

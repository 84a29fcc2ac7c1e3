"""A parameter server under a TorchRec model; see docs/parameter_server.md.

``import torchrec_dynamic_embedding`` is the same. Importing needs no torchrec; :func:`wrap` does.
"""

from typing import Any

from dynamicemb.errors import missing_package
from dynamicemb.tde import ops as _ops  # noqa: F401  defines torch.ops.tde
from dynamicemb.tde.include import include_dir

__all__ = ["include_dir", "save", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in ("save", "wrap"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dynamicemb.tde import dataloader
    except ModuleNotFoundError as error:
        if error.name not in ("torchrec", "fbgemm_gpu"):
            raise
        raise missing_package(f"dynamicemb.tde.{name}", "torchrec", "torchrec") from error
    return getattr(dataloader, name)

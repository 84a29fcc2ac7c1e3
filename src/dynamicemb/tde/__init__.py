"""A parameter server under a TorchRec model; see docs/parameter_server.md.

``import torchrec_dynamic_embedding`` is the same.
"""

from dynamicemb.tde import ops as _ops  # noqa: F401  defines torch.ops.tde
from dynamicemb.tde.include import include_dir

__all__ = ["include_dir"]

"""A parameter server under a TorchRec model: another name of ``dynamicemb.tde``."""

from dynamicemb.tde import __getattr__, ops  # noqa: F401  ops defines torch.ops.tde

__all__ = ["save", "wrap"]

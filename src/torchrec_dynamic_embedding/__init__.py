"""A parameter server under a TorchRec model: another name of ``dynamicemb.tde``."""

import dynamicemb.tde  # noqa: F401  defines torch.ops.tde

"""``torch.ops.tde``."""

from __future__ import annotations

import torch

from dynamicemb.tiers.remote.plugin import register_io

_library = torch.library.Library("tde", "DEF")
_library.define("register_io(str path) -> ()")
_library.impl("register_io", register_io, "CompositeExplicitAutograd")

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

from fbgemm_on_cuda import on_one_gpu  # noqa: F401  a fixture

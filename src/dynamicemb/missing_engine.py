"""What stands in for the C++ extension on a machine that has not built it."""

from __future__ import annotations

from typing import Any

from dynamicemb.errors import UsageError


class MissingEngine:
    """Whoever uses it learns that the extension is not there, and why."""

    def __init__(self, cause: ImportError) -> None:
        self._cause = cause

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"_engine.{name} is needed, but the C++ extension of dynamicemb is not built "
            f"({self._cause}); install the package (pip install .). Without it there are tables on "
            "a GPU, and nothing in main memory or files"
        ) from self._cause

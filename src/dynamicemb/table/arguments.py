"""Checks of the tensors that are given to a table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.tracing import check_memory, refuse_tracers


class CheckedArguments(ABC):
    """The part of a table that checks what it is given, before anything changes."""

    name: str

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dim(self) -> int: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def state_dim(self) -> int: ...

    @property
    @abstractmethod
    def score_words(self) -> int: ...

    def check_ids(self, name: str, ids: object) -> torch.Tensor:
        """``ids`` as a contiguous int64 tensor (uint64 by its bits)."""
        if not isinstance(ids, torch.Tensor):
            raise wrong_type(name, ids, "a tensor of int64 or uint64")
        refuse_tracers()
        if ids.dtype not in (torch.int64, torch.uint64):
            raise wrong_type(f"{name}.dtype", ids.dtype, "torch.int64 or torch.uint64")
        if ids.dim() != 1:
            raise wrong_value(f"{name}.shape", tuple(ids.shape), "one dimension")
        self.check_device(name, ids)
        return ids.resolve_neg().contiguous().view(torch.int64)

    def check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise InvalidArgumentError(
                f"{name}.device is {str(tensor.device)!r}; allowed: {str(self.device)!r}, where "
                f"table {self.name!r} is"
            )
        if tensor.layout != torch.strided:
            raise wrong_value(f"{name}.layout", tensor.layout, "torch.strided")
        check_memory(name, tensor)

    def check_rows(
        self, name: str, rows: object, count: int, columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """``rows`` as a contiguous [count, columns] tensor of ``dtype``."""
        if not isinstance(rows, torch.Tensor):
            raise wrong_type(name, rows, f"a tensor of {dtype}")
        if rows.dtype != dtype:
            raise wrong_type(f"{name}.dtype", rows.dtype, str(dtype))
        if rows.shape != (count, columns):
            raise wrong_value(f"{name}.shape", tuple(rows.shape), str((count, columns)))
        self.check_device(name, rows)
        return rows.detach().resolve_neg().contiguous()

    def check_whole_rows(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The rows that :meth:`insert` and :meth:`assign` take, contiguous."""
        ids = self.check_ids("ids", ids)
        n = len(ids)
        embeddings = self.check_rows("embeddings", embeddings, n, self.dim, self.dtype)
        if state is not None:
            state = self.check_rows("state", state, n, self.state_dim, torch.float32)
        if scores is not None:
            scores = self.check_scores(scores, n)
        return ids, embeddings, state, scores

    def check_counts(self, counts: object, count: int) -> torch.Tensor:
        """``counts`` as a contiguous int64 tensor of positive numbers."""
        if not isinstance(counts, torch.Tensor) or counts.dtype != torch.int64:
            raise wrong_type("counts", getattr(counts, "dtype", counts), "a tensor of int64")
        if counts.shape != (count,):
            raise wrong_value("counts.shape", tuple(counts.shape), str((count,)))
        self.check_device("counts", counts)
        if count and int(counts.min()) < 1:
            raise wrong_value("counts", int(counts.min()), "at least 1")
        return counts.contiguous()

    def check_scores(self, scores: object, count: int) -> torch.Tensor:
        """``scores`` as a contiguous int64 tensor (uint64 by its bits)."""
        if not isinstance(scores, torch.Tensor) or scores.dtype not in (torch.int64, torch.uint64):
            raise wrong_type(
                "scores", getattr(scores, "dtype", scores), "a tensor of int64 or uint64"
            )
        shape = (count,) if self.score_words == 1 else (count, 2)
        if scores.shape != shape:
            raise wrong_value("scores.shape", tuple(scores.shape), str(shape))
        self.check_device("scores", scores)
        return scores.contiguous().view(torch.int64)

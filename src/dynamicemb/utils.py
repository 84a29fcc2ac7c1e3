"""Names under the import path that existing code uses. Needs torchrec."""

from __future__ import annotations

from dynamicemb.errors import missing_package
from dynamicemb.options import SUPPORTED_EMBEDDING_DTYPES
from dynamicemb.types import torch_to_dyn_emb

try:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.utils", "torchrec", "torchrec") from error

__all__ = ["DTYPE_NUM_BYTES", "TORCHREC_TYPES", "torch_to_dyn_emb"]

#: The collections that sharders replace.
TORCHREC_TYPES = {EmbeddingBagCollection, EmbeddingCollection}
#: Bytes of one element, by the dtypes that rows can have.
DTYPE_NUM_BYTES = {dtype: dtype.itemsize for dtype in SUPPORTED_EMBEDDING_DTYPES}

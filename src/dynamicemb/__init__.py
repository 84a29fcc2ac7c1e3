"""dynamicemb: embedding tables for PyTorch whose ids are any 64-bit integers."""

from typing import TYPE_CHECKING

try:  # first: the modules below import it by this name
    import dynamicemb._engine  # noqa: F401  (tells a missing module from one that fails)
    from dynamicemb import _engine as _engine
except ModuleNotFoundError as _error:
    from dynamicemb.missing_engine import MissingEngine

    _engine = MissingEngine(_error)  # type: ignore[assignment]

from dynamicemb import tiers as tiers  # lets create_table make tables with a store below
from dynamicemb.admission import (
    AdmissionStrategy,
    Counter,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.capacity import get_sharded_table_capacity, get_table_value_bytes
from dynamicemb.checkpoint import (
    DumpHandle,
    DynamicEmbDump,
    DynamicEmbLoad,
    LoadReport,
    TableLoad,
    dump_async,
)
from dynamicemb.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptCheckpointError,
    CorruptStoreError,
    DynamicEmbError,
    InsertionError,
    InvalidArgumentError,
    OutOfMemoryError,
    ReplacedCheckpointError,
    StoreError,
    UsageError,
)
from dynamicemb.nn import (
    BatchedDynamicEmbeddingTables,
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    averaging,  # noqa: F401  lets torch's AveragedModel average rows
    compiled,  # noqa: F401  registers the operators
    torch_optim,  # noqa: F401  registers the hooks
)
from dynamicemb.optimizers import OptimizerArgs, emb_optim_type_of
from dynamicemb.options import (
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    ScoreStrategy,
    align_to_table_size,
    string_to_evict_strategy,
)
from dynamicemb.texts import text_id, text_ids
from dynamicemb.types import (
    data_type_to_dtype,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    torch_to_dyn_emb,
)

if TYPE_CHECKING:
    from dynamicemb.optimizers import EmbOptimType
else:
    __getattr__ = emb_optim_type_of(__name__)  # fbgemm's class, imported when it is asked for

__version__ = "0.1.0"

__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEMB_TABLE_ALIGN_SIZE",
    "MAX_BUCKET_CAPACITY",
    "AdmissionStrategy",
    "ArgumentTypeError",
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
    "CheckpointError",
    "CorruptCheckpointError",
    "CorruptStoreError",
    "Counter",
    "DumpHandle",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbError",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "InsertionError",
    "InvalidArgumentError",
    "KVCounter",
    "LoadReport",
    "OptimizerArgs",
    "OutOfMemoryError",
    "ProbabilityAdmissionStrategy",
    "ReplacedCheckpointError",
    "ScoreStrategy",
    "StoreError",
    "TableLoad",
    "UsageError",
    "align_to_table_size",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dump_async",
    "dyn_emb_to_torch",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "string_to_evict_strategy",
    "text_id",
    "text_ids",
    "torch_to_dyn_emb",
]

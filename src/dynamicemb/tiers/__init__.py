"""Tables larger than memory: stores of rows below a table, and the table that is a cache over one.

``DynamicEmbTableOptions(caching=True, local_hbm_for_values=...)`` or ``external_storage=...`` make
such a table; see docs/tiers.md.
"""

from dynamicemb.table.create import make_with_store
from dynamicemb.tiers.base import BoundedStore, RowLayout, Store, StoreStats
from dynamicemb.tiers.cached_table import CachedTable
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.layout import create_cached_table
from dynamicemb.tiers.levels import CacheStats
from dynamicemb.tiers.remote.store import RemoteStore
from dynamicemb.tiers.ssd import SsdStore
from dynamicemb.tiers.stack import Stack

__all__ = [
    "BoundedStore",
    "CacheStats",
    "CachedTable",
    "HostStore",
    "RemoteStore",
    "RowLayout",
    "SsdStore",
    "Stack",
    "Store",
    "StoreStats",
]

make_with_store(create_cached_table)

"""Tables larger than memory: stores of rows below a table."""

from dynamicemb.tiers.base import RowLayout, Store, StoreStats
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.ssd import SsdStore

__all__ = ["HostStore", "RowLayout", "SsdStore", "Store", "StoreStats"]

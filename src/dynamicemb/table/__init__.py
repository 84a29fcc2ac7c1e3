"""Tables: scored hash tables whose rows are trained.

``create_table`` makes one table; a :class:`TableGroup` looks up and updates several at once.
"""

from dynamicemb.table.base import Table
from dynamicemb.table.create import create_group, create_table
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import (
    Found,
    Inserted,
    Lookup,
    Pooling,
    Progress,
    Rows,
    SummedGradients,
    TableStats,
    Written,
)
from dynamicemb.table.scored import timestamp_clock

__all__ = [
    "Found",
    "Inserted",
    "Lookup",
    "Pooling",
    "Progress",
    "Rows",
    "SummedGradients",
    "Table",
    "TableGroup",
    "TableStats",
    "Written",
    "create_group",
    "create_table",
    "timestamp_clock",
]

"""Dynamic tables in ``torch.distributed.checkpoint``."""

from dynamicemb.checkpoint.dcp import DynamicTables, dense_state_dict

__all__ = ["DynamicTables", "dense_state_dict"]

"""See ``dynamicemb.tde.utils``."""

from dynamicemb.tde.utils import _get_sharded_modules_recursive

__all__ = ["_get_sharded_modules_recursive"]

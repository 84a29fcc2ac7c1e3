"""See ``dynamicemb.tde.tensor_list``."""

from dynamicemb.tde.tensor_list import TensorList

__all__ = ["TensorList"]

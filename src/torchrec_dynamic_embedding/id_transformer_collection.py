"""See ``dynamicemb.tde.id_transformer_collection``."""

from dynamicemb.tde.id_transformer_collection import IDTransformerCollection

__all__ = ["IDTransformerCollection"]

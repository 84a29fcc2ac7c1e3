"""See ``dynamicemb.tde.id_transformer_group``."""

from dynamicemb.tde.id_transformer_group import IDTransformerGroup

__all__ = ["IDTransformerGroup"]

"""See ``dynamicemb.tde.id_transformer``."""

from dynamicemb.tde.id_transformer import IDTransformer, TransformResult

__all__ = ["IDTransformer", "TransformResult"]

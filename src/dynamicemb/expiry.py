"""Rows that were not used for long leave the dynamic tables of a model."""

from dynamicemb.nn.expiry import expire_rows

__all__ = ["expire_rows"]

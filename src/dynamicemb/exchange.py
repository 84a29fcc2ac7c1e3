"""Rows to and from other tools: safetensors, Parquet, NumPy, tensors."""

from dynamicemb.checkpoint.exchange import Imported, export_table, import_rows, import_table

__all__ = ["Imported", "export_table", "import_rows", "import_table"]

"""See ``dynamicemb.tde.ps``."""

from dynamicemb.tde.ps import DEFAULT_PS_CHUNK_SIZE, PS, FetchHandle, PSCollection

__all__ = ["DEFAULT_PS_CHUNK_SIZE", "PS", "FetchHandle", "PSCollection"]

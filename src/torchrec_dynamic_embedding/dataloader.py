"""See ``dynamicemb.tde.dataloader``."""

from dynamicemb.tde.dataloader import DataLoader, DataLoaderIter, save, wrap

__all__ = ["DataLoader", "DataLoaderIter", "save", "wrap"]

"""``dynamicemb bench``, and what it shares with the programs in ``benchmarks/``."""

"""Stores outside the process: Redis, ``memory://``, and native plug-ins. See
docs/parameter_server.md."""

"""``dynamicemb doctor``: what is installed, what the machine has, tiny runs of what should work."""

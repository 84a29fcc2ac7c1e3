"""``dynamicemb serve``: states of a checkpoint that follow each other, and lookups over HTTP."""

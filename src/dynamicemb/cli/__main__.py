"""``python -m dynamicemb.cli``."""

import sys

from dynamicemb.cli.app import main

sys.exit(main())

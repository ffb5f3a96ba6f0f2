"""``python -m ckptflow.cli``."""

import sys

from ckptflow.cli.main import main

sys.exit(main())

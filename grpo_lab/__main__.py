"""``python -m grpo_lab``: see cli.py."""

import sys

from grpo_lab.cli import main

sys.exit(main())

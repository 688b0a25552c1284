import sys
from pathlib import Path

import mn_compat  # noqa: F401 - where no .pth file was run, this activates it

# For the tables of cases.
sys.path.insert(0, str(Path(__file__).parent))

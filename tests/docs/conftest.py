"""The builders of tiny datasets and models in the neighboring folders, for the pages' stand-ins."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("data", "words")]

"""Image recognition with Vision Transformers.

The public names are listed in `__init__.pyi`, and each is imported when first used, so that importing the package is
instant and has no effect.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

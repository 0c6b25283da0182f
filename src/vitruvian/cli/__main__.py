"""`python -m vitruvian.cli` is `vit`."""

from vitruvian.__main__ import main

main()

"""`python -m vitruvian.cli` is `vit`."""

from vitruvian.cli import main

main()

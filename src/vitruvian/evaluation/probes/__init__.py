"""What a frozen model already knows of a data set."""

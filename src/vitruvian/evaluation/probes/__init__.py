"""What a frozen model already knows of a dataset."""

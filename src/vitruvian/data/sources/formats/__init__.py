"""The formats that datasets come in."""

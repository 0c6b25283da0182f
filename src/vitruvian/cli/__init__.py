"""The command `vit`: `app` collects the commands, and each of them parses, calls one library function and prints."""

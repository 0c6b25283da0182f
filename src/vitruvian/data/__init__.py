"""Images: files decoded to upright RGB, and the view of them that a model asks for."""

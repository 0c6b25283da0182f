"""An HTTP service around prediction and explanation, and a page on which a model can be understood."""

"""Images and datasets: decode, preprocess, augment, formats, the order of samples, packing, and `vit doctor`."""

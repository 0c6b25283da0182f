"""Export models to graphs, run graphs in ONNX Runtime and OpenVINO, and choose the fastest engine."""

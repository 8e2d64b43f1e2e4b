"""Which contraction order and which kernel evaluates an operation: tensors and shapes in, tensors out."""

"""Kernels for decoding: tensors in, tensors out. They are compiled when first needed, because a compiler is optional."""

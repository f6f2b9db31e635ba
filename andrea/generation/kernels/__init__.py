"""Decoding's own kernels: tensors in, tensors out. Compiled when first needed, because a compiler is optional."""

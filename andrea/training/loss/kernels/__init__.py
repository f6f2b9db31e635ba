"""Triton kernels: tensors in, tensors out. Imported when first needed, because triton is optional."""

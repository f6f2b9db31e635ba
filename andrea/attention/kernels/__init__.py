"""Our attention kernels in Triton and C++: tensors in, tensors out. The Triton kernels are imported when first needed."""

"""The machine: devices, compiling, C++, torchrun, files."""

"""The machine: device and precision, torch.compile, our C++, restarts by torchrun, files."""
